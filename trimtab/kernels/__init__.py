"""One package per operation: a public function with `impl=` in `__init__.py`, a module per implementation, a `spec.py`.

Importing this package, or any `spec.py` in it, imports no torch.
"""
