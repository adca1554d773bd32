"""Records operators, Triton launches, stream operations and compiled kernels of a commit without a CUDA GPU.

`device.py` emulates a CUDA device on the CPU: tensors are on `cuda:0` for Python and hold their values in host memory.
`launches.py` takes the place of Triton's driver: kernels are specialized as for a launch on an H200, recorded, and not
run. `cuda_api.py` replaces torch.cuda. `cases.py` has the kernel calls and training runs, each recorded as a
sequence of `log.Entry`; `compiled.py` compiles the launched kernels to PTX, and `compare.py` compares two commits.
"""
