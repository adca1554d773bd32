"""Model → model: ways to run the same decoder otherwise. Each step leaves the parameters' names as they are.

Names resolve when they are used (PEP 562), so that the specs in here import no torch.
"""
