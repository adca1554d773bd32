"""Costs and gains of torch.compile: graph breaks, recompilations with their reasons, compile time, step time."""
