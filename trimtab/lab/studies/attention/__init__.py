"""Attention by backend, length, head dimension and precision: time of both passes, memory, crossover lengths.

settings.py     the settings that identify a measurement
cells.py        validates options and returns the cells
formula.py      bytes before backward, from shape and dtype
passes.py       the timed forward and backward pass
measure.py      verifies a cell, then measures memory and times; weighted_sum.py the kernel of the tutorial
results.py      result types
readings.py     measurements, sorted for the report
crossover.py    compares two variants, and finds the crossover length
report.py       the report; tables.py, compiled_report.py and memory_report.py have its parts
"""
