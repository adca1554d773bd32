"""The one measuring library: time, profiles, memory, records and the calibration of a machine.

    timing.py           time of functions on a CPU or a CUDA GPU, measured in turns; the device's peak rates
    samples.py          times of repeated runs and their statistics; imports no torch
    step_timing.py      time of whole steps by the host's and the device's clock; step_times.py keeps them
    profiles.py         time by kernel or operator, from torch's profiler; profile_data.py what a profile is,
                        kernel_kinds.py the kind of a kernel by its name
    memory.py           peak bytes and the timeline of allocations
    memory_recorder.py  what each allocation is for and where it is made: memory_attribution.py, memory_roles.py;
                        memory_blocks.py has the blocks, memory_summary.py what a report shows of them
    profiling.py        a recipe's step measured next to its plan (`trimtab profile`): profile_target.py builds it,
                        profile_result.py keeps it, suggestions.py has what would help most
    records.py          results as JSON lines, with provenance; recorded cases are skipped
    contests.py         implementations of one operation: verified, then timed
    random_models.py    Hugging Face folders with random weights
    calibrate.py        the rates of this machine, for the planner; probes*.py have what it times, machine_state.py
                        busy machines, links and disks, launch_overhead.py the host's time per operation
    training_step.py    one step of a recipe, built as `trimtab train` builds it
    training_runs.py    whole runs of a recipe without output; models that come in a package
    operation_times.py  measured time of each declared operation of a model; operation_labels.py names them
    compilation.py      what torch.compile does: graph breaks, recompilations, seconds; compile_data.py keeps it
    nvtx.py             the same names as NVTX ranges, for NVIDIA's tools
    study.py            what a study is; studies/ has them, each with cells.py, measure.py and report.py
    study_models.py     the five models that studies measure; study_step.py builds one, ready to be timed, as
                        step_settings.py describes; study_modes.py compiles it, study_graphs.py captures it
    sweep.py            cells in worker processes (worker.py), kept as they are measured, resumable
    numerics/           studies of dtypes: bits, sums, autocast, quantization
    reporting.py        measurements to a document, a document to files

`benchmarks/` has the peers, the claims and the results. Nothing that trains imports this package.
"""
