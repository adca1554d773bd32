"""Plain data that every other package may import: dtypes, devices, model shapes, errors. Imports no torch."""
