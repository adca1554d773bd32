"""What a commit asks of a CUDA GPU, recorded without one: operators, Triton launches, streams, and compiled kernels.

`device.py` emulates a CUDA device on the CPU: tensors are on `cuda:0` for Python and hold their values in host memory.
`launches.py` takes the place of Triton's driver: kernels are specialized as for a launch on an H200, recorded, and not
run. `cuda_api.py` answers for torch.cuda. `cases.py` names the kernel calls and training runs, each of which gives a
sequence of `log.Entry`; `compiled.py` compiles the launched kernels to PTX, and `compare.py` compares two commits.
"""
