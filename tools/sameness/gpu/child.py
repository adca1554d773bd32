"""A process that records cases with the trimtab of one tree. Started by `tools.sameness.ptx`; arguments come as JSON.

Each case runs in a fork of this process: module state cannot affect another case.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tools.sameness.gpu.cases import Recorded, cases
from tools.sameness.gpu.compiled import compile_kernel
from tools.sameness.gpu.cuda_api import emulated_cuda_api
from tools.sameness.gpu.device import EmulatedDevice, emulated_tensors
from tools.sameness.gpu.launches import launchable, recorded_launches
from tools.sameness.gpu.log import Log
from tools.sameness.gpu.recording import Recording, Store


@dataclass(frozen=True)
class Job:
    """The cases that a process records."""

    tree: str
    names: list[str]
    world: str
    out: str
    processes: int


def main() -> None:
    """Records every case of the job that is given as the only argument."""
    job = Job(**json.loads(sys.argv[1]))
    sys.path.insert(0, job.tree)
    import torch

    import trimtab

    found = Path(trimtab.__file__).resolve()
    assert found.is_relative_to(Path(job.tree).resolve()), f"{found} is not in {job.tree}"
    torch.set_num_threads(1)
    _import_everything(trimtab)
    Store(Path(job.out)).write_launchable(launchable("trimtab"))
    known, running = cases(Path(job.world)), 0
    for name in job.names:
        if running == job.processes:
            os.wait()
            running -= 1
        if os.fork() == 0:
            _in_fork(name, known[name], Store(Path(job.out)))
        running += 1
    while running:
        os.wait()
        running -= 1


def _import_everything(package: ModuleType) -> None:
    """Once for all forks; torch imports its compiler when a dispatch mode is first used."""
    for module in (
        "torch._dynamo",
        *(one.name for one in pkgutil.walk_packages(package.__path__, "trimtab.")),
    ):
        if not module.endswith("__main__"):
            importlib.import_module(module)


def _in_fork(name: str, case: Recorded, store: Store) -> None:
    """Records a case and ends the process, whatever happens: it must not continue its parent's loop."""
    try:
        log, recording = record(name, case)
        compile_launched(log, store)
        store.write(recording)  # last: what has a file is complete
        print(f"{name} {recording.seconds:.1f} s {recording.error or ''}", flush=True)
    except BaseException:  # noqa: BLE001  (printed; the missing file is reported by the comparison)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def record(name: str, case: Recorded) -> tuple[Log, Recording]:
    """Runs a case on the emulated device."""
    log, started, error = Log(), time.monotonic(), None
    try:
        with emulated_cuda_api(log), emulated_tensors(log), recorded_launches(log), EmulatedDevice(log):
            case()
    except Exception as failure:  # noqa: BLE001  (a case that fails is a result, compared like any other)
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:300]
        traceback.print_exc()
    seconds = round(time.monotonic() - started, 1)
    return log, Recording(name, log.entries, log.specializations, error, seconds)


def compile_launched(log: Log, store: Store) -> None:
    """Compiles the kernels that no other case has compiled."""
    for key, (source, options) in log.sources.items():
        if not store.claim(key):
            continue
        try:
            store.write_kernel(key, compile_kernel(source, options))
        except Exception as failure:  # noqa: BLE001  (a kernel that does not compile is a result)
            store.write_kernel(key, None, f"{type(failure).__name__}: {failure}"[:300])


if __name__ == "__main__":
    main()
