"""Memory of the study models: peaks by context and precision, their buckets, and the line of each allocation."""
