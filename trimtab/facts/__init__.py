"""Numbers, shapes and names that every other room may use. Imports nothing of ours and no torch."""
