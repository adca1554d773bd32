"""Compares every operation with its peers: `python -m benchmarks.kernels`. One module per operation, with `cases()`."""
