"""Which kernels a step spends its time in: forward pass and full step, by kernel and by kind."""
