"""Time of a step by kernel and by kind of kernel, for the forward pass and the full step."""
