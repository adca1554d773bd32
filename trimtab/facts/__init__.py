"""Plain data that every other package may use: dtypes, devices, model shapes, errors. Imports no torch."""
