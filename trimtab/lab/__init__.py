"""Measuring: how long something takes on this machine, what memory, beside what the machine could do.

    from trimtab.lab.timing import time_together

Benchmarks use this room; nothing that trains imports it.
"""
