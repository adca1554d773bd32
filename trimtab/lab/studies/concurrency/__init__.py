"""One file of prompts, generated one by one, in a batch, by threads, by asyncio and by processes.

ways.py      the ways, and the torch threads of each
process.py   a process with a model, which generates its share of the prompts on a signal
"""
