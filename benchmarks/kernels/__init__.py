"""Every operation vs. its peers: `python -m benchmarks.kernels`. One module per operation, with `cases()`."""
