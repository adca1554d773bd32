"""Attention by backend, length, head dimension and precision: time of both passes, memory, where each one pays.

settings.py     what identifies one measurement
cells.py        the options, checked, and the cells that they ask for
formula.py      bytes before backward, from shape and dtype
measure.py      one cell: verified, then memory and times; weighted_sum.py the kernel of the tutorial
results.py      what a measurement consists of
readings.py     measurements, sorted for the report
comparing.py    which of two backends is faster, and from which length on
report.py       the report; tables.py and memory_report.py have its parts
"""
