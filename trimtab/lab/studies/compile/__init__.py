"""What torch.compile costs and gains: graph breaks, recompilations with their reasons, seconds, step time."""
