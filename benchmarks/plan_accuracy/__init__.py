"""How far predicted memory and time are from measured: `python -m benchmarks.plan_accuracy`."""
