"""Accuracy of the predicted memory and time: `python -m benchmarks.plan_accuracy`."""
