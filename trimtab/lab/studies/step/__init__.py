"""Time of a step and of its parts: sizes, contexts, precisions, eager, compiled and captured, and the warm-up."""
