"""The measurement library: time, profiles, memory, records and the calibration of a machine.

    timing.py           time of functions on a CPU or a CUDA GPU, measured in turns; the device's peak rates
    samples.py          times of repeated runs and their statistics; imports no torch
    step_timing.py      time of whole steps by the host's and the device's clock; step_times.py stores them
    profiles.py         time by kernel or operator, from torch's profiler; profile_data.py stores it,
                        kernel_kinds.py classifies kernels by name
    memory.py           peak bytes and the timeline of allocations
    memory_recorder.py  the role and the source line of each allocation: memory_attribution.py, memory_roles.py;
                        memory_blocks.py has the blocks, memory_summary.py the figures of a report
    profiling.py        a recipe's step measured next to its plan (`trimtab profile`): profile_target.py builds it,
                        profile_result.py stores it, suggestions.py ranks changes of the recipe
    records.py          results as JSON lines, with provenance; recorded cases are skipped
    contests.py         implementations of one operation: verified, then timed
    random_models.py    Hugging Face folders with random weights
    calibrate.py        the rates of this machine, for the planner; probes*.py have the timed operations,
                        machine_state.py busy machines, links and disks, launch_overhead.py host time per operation
    training_step.py    one step of a recipe, built as `trimtab train` builds it
    training_runs.py    whole runs of a recipe without output; models that come in a package
    operation_times.py  measured time of each declared operation of a model; operation_labels.py names them
    compilation.py      graph breaks, recompilations and compile time of torch.compile; compile_data.py stores them
    nvtx.py             the same names as NVTX ranges, for NVIDIA's tools
    study.py            cells, measurements and studies; studies/ has a package per study: cells, measure, report
    study_models.py     the five models that studies measure; study_step.py builds a step of one from the settings in
                        step_settings.py; study_modes.py compiles it, study_graphs.py captures it
    sweep.py            runs cells in worker processes (worker.py) and saves each measurement; resumable
    numerics/           studies of dtypes: bits, sums, autocast, quantization
    reporting.py        measurements to a document, a document to files

`benchmarks/` has the peers, the claims and the results. Nothing that trains imports this package.
"""
