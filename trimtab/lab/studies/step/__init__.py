"""Time of a step and of its parts by size, context, precision, mode (eager, compiled, captured) and warm-up."""
