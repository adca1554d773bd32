"""Benchmarks: each script measures one claim; README.md lists them."""
