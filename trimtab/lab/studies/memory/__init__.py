"""Memory of the study models: peaks by context and precision, what fills them, where each allocation is made."""
