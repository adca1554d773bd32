"""The command line: one file a verb. Parses, calls, prints; nothing else."""
