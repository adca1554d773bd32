"""Remedies that a test cannot follow, by reason: they require actions outside of the program."""

from __future__ import annotations

DISK = "asks for room on the disk, for rights, or for a disk that works"
PACKAGE = "asks for a package or another version to be installed"
GPU = "is met on a CUDA device only, or names what runs on one only"
MEMORY = "asks for memory that other programs hold"
HUB = "depends on what the hub, or the user's account there, does"
PASSED_ON = "passes on the remedy of another error, which has a case of its own"
STATED = "the cause itself says what is expected, and how the place is written"
OURS = "asks to report a mistake of trimtab's"

OUTSIDE: dict[str, tuple[str, ...]] = {
    DISK: (
        "data/in_memory.py:spool_rows: free some space, set data.cache_dir to another folder, or set data.streaming: "
        "true with max_steps",
        "api/batches.py:generate_file: repeat the call with a smaller {}; it continues after these rows",
        "api/prompt_files.py:OutputFile.write: free some space and repeat the call, which continues after these rows, "
        "or name another {}",
        "adapt/offload.py:_Pinned.__init__: set recompute: block, or raise the locked memory limit (ulimit -l)",
        "checkpoint/lock.py:RunLock._unwritable: check the permissions of the folder and its files",
        "checkpoint/store.py:_no_space: free some space{}, then resume; the earlier checkpoints are intact",
        "checkpoint/store.py:_explain: raise the file size limit (ulimit -f), or move the run folder to another disk, "
        "then resume; the earlier checkpoints are intact",
        "checkpoint/tensors.py:read_back: check the disk; the earlier checkpoints were not touched",
        "cli/commands.py:_resource_error: free some space or check the folder's permissions",
        "cli/commands.py:_resource_error: free some space, or redirect the output elsewhere",
        "data/cache.py:TokenCache._build: free some space, or use another folder: data.cache_dir in a recipe, "
        "--cache-dir of `trimtab eval`",
        "data/tokenizer_pool.py:_Worker._died: free some memory or lower num_proc, then try again",
        "export/hf.py:_export_mismatch: no folder was written; check the disk and try again",
        "export/peft.py:_export_mismatch: no folder was written; check the disk and try again",
        "export/reader.py:read_tensors: check the disk and try again",
        "export/reader.py:_read_header: check the disk and try again",
        "hub/faults.py:explain: free some space, or set HF_HUB_CACHE to another disk",
        "hub/faults.py:explain: set HF_HUB_CACHE to a writable folder",
        "hub/repository.py:Repository._check_space: free some space, or set HF_HUB_CACHE to another disk",
        "model/save.py:check_space: free some space or choose another folder",
        "model/save.py:staged_folder: check the free disk space and the permissions",
        "model/save.py:write_tensors: check the free disk space",
        "model/weights_safetensors.py:_open: check the permissions of the file and its folder",
        "model/weights_safetensors.py:_open: check the disk",
        "plan/disk.py:check_disk: free some space or {}",
        "plan/disk.py:check_disk: free some space, {}, or {}",
        "recipe/loading.py:load: check its permissions",
        "report/rundata.py:_unreadable: check its permissions",
        "run/folder.py:_writing: free some disk space or check the permissions",
        "trainer/metrics_log.py:_explain: free some space and resume; records already written are kept",
        "trainer/metrics_log.py:_explain: check the run folder",
    ),
    PACKAGE: (
        "api/results.py:RunResult.to_pandas: pip install pandas",
        "checkpoint/manifest.py:read_manifest: install the version of trimtab that wrote it, or a later one",
        "cli/commands.py:main: pip install 'trimtab[train]'",
        "data/resume_checks.py:LoaderSettings.check: resume with the trimtab version that wrote it",
        "data/readers_text.py:_zstd: pip install 'trimtab[train]'",
        "data/readers_parquet.py:parquet_schema: pip install 'trimtab[train]'",
        "data/readers_parquet.py:parquet_values: pip install 'trimtab[train]'",
        "model/families/gguf_metadata.py:shape_from_gguf: join them with llama-gguf-split --merge",
        "run/device.py:check_device: pip install 'trimtab[train]'",
        "run/device.py:require_torch: pip install 'trimtab[train]'",
        "run/device.py:require_trackers: pip install 'trimtab[{}]'",
        "run/choices.py:_read: use that version",
        "report/rundata.py:_plan: use a newer trimtab",
        "starter/files.py:base_folder: reinstall trimtab",
        "trainer/tracking.py:TensorBoardSink.__init__: pip install 'trimtab[tensorboard]'",
        "trainer/tracking.py:WandbSink.__init__: pip install 'trimtab[wandb]'",
    ),
    GPU: (
        "lab/profiling.py:_Profiling._details: use --nvtx for NVIDIA's own tools, or run `trimtab doctor`",
        "cli/commands.py:_resource_error: lower per_device_train_batch_size or max_seq_length; see `trimtab plan`",
        "run/device.py:check_device: use one of these; the environment variable CUDA_VISIBLE_DEVICES decides which "
        "GPUs torch sees",
        "kernels/attention/impl_flex.py:attention_flex: use triton or sdpa_flash",
        "kernels/attention/impl_sdpa.py:attention_sdpa: use varlen or flex, or set auto",
        "kernels/attention/impl_sdpa.py:attention_sdpa: use triton or sdpa_efficient",
        "kernels/attention/launch_triton.py:check: use fp32, fp16 or bf16",
        "kernels/attention/launch_triton.py:check: use sdpa_efficient",
        "kernels/attention/launch_triton.py:check: use fp16",
        "kernels/rms_norm/impl_triton.py:check_width: use 'reference'",
    ),
    MEMORY: (
        "lab/profiling.py:_explained: use a device with more memory",
        "lab/calibrate.py:_CalibrationRun._best_copy: end other programs that use it and calibrate again",
    ),
    HUB: (
        "hub/faults.py:_explain_status: check the id and the revision",
        "hub/faults.py:_explain_status: log in with `hf auth login`, or set HF_TOKEN",
        "hub/faults.py:_explain_status: use another model or dataset",
        "hub/repository.py:Repository.fetch: try again",
        "hub/repository.py:_query_hub: check that the endpoint is a hub",
    ),
    PASSED_ON: (
        "api/batches.py:_named: {}",
        "data/examples.py:example_of: {}",
        "data/rendering.py:Renderer._rendered: {}",
        "recipe/problems.py:combine: (none)",
        "recipe/problems.py:combine: {}",
        "text/chat.py:_failed: {}",
    ),
    STATED: (
        "checkpoint/manifest.py:read_manifest: (none)",
        "checkpoint/manifest.py:verify: (none)",
        "recipe/problems.py:_no_matching_type: (none)",
        "recipe/problems.py:_problem: (none)",
        "recipe/problems.py:_wrong_type: (none)",
        "run/out_of_memory.py:MemoryExplainer.during: (none)",
    ),
    OURS: (
        "data/tokenizing.py:TokenizerSpec.of: this is a bug in trimtab; please report it with the model's name",
    ),
}
