"""One file of prompts, generated one by one, in a batch, by threads, by asyncio and by processes.

ways.py      the ways, and the threads of torch that each gets
process.py   a process with a model: generates its share of the prompts on a signal
"""
