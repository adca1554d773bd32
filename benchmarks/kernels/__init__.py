"""Every operation beside its peers: `python -m benchmarks.kernels`. One module an operation, each with `cases()`."""
