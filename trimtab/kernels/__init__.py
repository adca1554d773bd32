"""One folder an operation: its door with `impl=` in `__init__.py`, one implementation a file, a `spec.py`.

Importing this package, or any `spec.py` below it, imports no torch.
"""
