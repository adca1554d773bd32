"""A worker process: measures cells that it reads as JSON lines, until its input ends.

    python -m trimtab.lab.worker DEVICE [MODULE…]

The worker writes READY once torch and the modules are imported. Then the parent writes {"measure": "module:function",
"settings": {…}} and reads {"outcome", "result", "message"}. With "release": true the worker first frees memory that
torch has cached, which other processes may need. Output of a cell goes to standard error. After a cell that ran out of
memory or failed, the parent starts a new process: the state of this one may be damaged.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from trimtab.facts.errors import OutOfMemory, is_out_of_memory
from trimtab.lab.study import CellOutcome, NotSupported, PredictedOutOfMemory
from trimtab.run.device import current_gpu

READY = "ready\n"
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sets the signal sent when the parent ends."""
_PLACE = re.compile(r"^\[enforce fail at [^]]*\] (?:\S+ == \S+\. )?")
HOST_SHARE = 0.9
"""Share of the host's free memory that a cell on a CPU may use; beyond it torch raises and nothing swaps."""


def main() -> int:
    """Measures cells until the input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    device, *modules = sys.argv[1:]
    import torch  # noqa: F401 - outside the first cell's time, and before the memory limit is set

    for module in modules:
        with contextlib.suppress(ImportError):  # an error of the cell, which imports it again
            import_module(module)
    if not device.startswith("cuda"):
        limit_host_memory()
    with current_gpu(device):
        _write(answers, READY)
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            imported = None if number else _freeze_objects
            answer = measure_cell(request["measure"], request["settings"], imported=imported)
            if request.get("release"):
                from trimtab.run.torch_setup import free_cached_memory

                free_cached_memory()
            _write(answers, json.dumps(answer) + "\n")
    return 0


def end_with_parent() -> None:
    """Makes Linux kill this process when its parent ends, however that happens.

    Otherwise a worker whose parent was killed would measure its cell to the end, and disturb what the GPU runs next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _freeze_objects() -> None:
    """Excludes all existing objects from garbage collection.

    They are mostly those of torch's modules, which live as long as the process. Studies collect garbage before and
    after each cell; without this, each collection traverses hundreds of thousands of objects while the GPU waits.
    Objects of a cell must not be frozen, so this precedes the first one.
    """
    gc.collect()
    gc.freeze()


def measure_cell(
    name: str, settings: dict[str, Any], *, imported: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Measures one cell; every error is turned into an outcome.

    Args:
        name: "module:function".
        settings: the argument of the function.
        imported: called once the module is imported, before the measurement.

    Example:
        >>> measure_cell("json:loads", "[1, 2")["outcome"]                               # doctest: +SKIP
        'failed'
    """
    module, _, function = name.partition(":")
    try:
        measure = getattr(import_module(module), function)
        if imported is not None:
            imported()
        result = measure(settings)
        json.dumps(result)  # a result that is not plain data counts as a failure of the cell
    except NotSupported as reason:
        return answer_without_result(CellOutcome.NOT_SUPPORTED, str(reason))
    except PredictedOutOfMemory as reason:
        return answer_without_result(CellOutcome.PREDICTED_OUT_OF_MEMORY, str(reason))
    except Exception as error:  # noqa: BLE001 - a cell that fails is a result, and the sweep continues
        if caused_by_out_of_memory(error):
            return answer_without_result(CellOutcome.OUT_OF_MEMORY, _first_line(error))
        traceback.print_exc()
        return answer_without_result(CellOutcome.FAILED, f"{type(error).__name__}: {_first_line(error)}")
    return {"outcome": CellOutcome.MEASURED.value, "result": result, "message": ""}


def caused_by_out_of_memory(error: BaseException) -> bool:
    """Whether an exception or its cause means that a GPU or the host ran out of memory.

    Example:
        >>> caused_by_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"))
        True
    """
    if isinstance(error, OutOfMemory) or is_out_of_memory(error):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and caused_by_out_of_memory(cause)


def limit_host_memory() -> None:
    """Limits this process to the free memory, so that a cell that needs more raises instead of swapping.

    Call it after importing torch, whose mapped libraries count towards the limit.
    """
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS: the system swaps
        return
    import resource

    from trimtab.facts.devices import host_memory

    _, available = host_memory()
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    limit = mapped + int(HOST_SHARE * available)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def answer_without_result(outcome: CellOutcome, message: str) -> dict[str, Any]:
    """The answer of a cell without a result."""
    return {"outcome": outcome.value, "result": {}, "message": message}


def _first_line(error: BaseException) -> str:
    """The first line of an error's message, without the place in torch's C++ code before it."""
    line = (str(error).strip() or "without a message").splitlines()[0]
    return _PLACE.sub("", line)[:300]


def _write(file: TextIO, line: str) -> None:
    file.write(line)
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
