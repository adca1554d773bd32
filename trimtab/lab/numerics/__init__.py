"""Quick studies of dtypes: rounding, sums, autocast and quantization.

    formats.py      floating-point formats from their definition, in exact arithmetic; no torch
    block_codes.py  codes that share a scale: nf4 and int8; no torch
    number_text.py  parses and prints numbers exactly; no torch
    bits.py         numbers in each format, bit by bit (stored.py: a number in one format); no torch
    accumulate.py   one number added many times, with every combination of accumulator and addend dtype
    autocast.py     the dtype of every operation of a model under autocast; norms.py: why norms stay in fp32
    quantize.py     INT8 and NF4: error by scheme and block size; samples.py: the quantized values, clipping.py:
                    clipping against rounding, naive_cast.py: the int8 cast that wraps around

Each study has a module `*_report.py` that makes a document of its result; `writing.py` writes records and report.
"""
