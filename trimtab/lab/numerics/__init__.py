"""Studies of dtypes that take no time to run: what is stored, summed, cast and quantized.

    formats.py      floating-point formats from their definition, in exact arithmetic; no torch
    block_codes.py  codes that share a scale: nf4 and int8; no torch
    number_text.py  numbers as users write them, and as tables show them; no torch
    bits.py         what each format stores of a number (stored.py: of one), bit by bit; no torch
    accumulate.py   one number added many times, in every mixture of formats
    autocast.py     the dtype of every operation of a model under autocast; norms.py: why norms stay in fp32
    quantize.py     INT8 and NF4: error by scheme and block size; samples.py: what is quantized, clipping.py: clipping
                    against rounding, naive_cast.py: the int8 cast that wraps around

Each study has a module `*_report.py` that makes a document of its result; `writing.py` writes records and report.
"""
