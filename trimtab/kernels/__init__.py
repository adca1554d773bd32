"""One folder per operation: a public function with `impl=` in `__init__.py`, one file per implementation, a `spec.py`.

Importing this package, or any `spec.py` below it, imports no torch.
"""
