"""Proves that training in two commits is bit-identical: short real runs of both are compared.

    make sameness PARENT=main~3
    python -m tools.sameness --parent main~3 --only 'lora*'
    python -m tools.sameness --list

Every case is a recipe of a few optimizer steps over a tiny model. It uses the public API (`trimtab.train`,
`trimtab.resume`, `trimtab.load`), so that the same script runs on both commits even if internal modules differ. It
records every loss, gradient norm and learning rate, every evaluation, checksums of the checkpoint's tensors by name,
and the results of the case's actions (generate, evaluate, export, merge).
"""
