"""Files of a machine's calibrations: one JSON file per GPU, or per CPU and number of threads. No torch.

$XDG_CACHE_HOME/trimtab/calibration/nvidia-h200.json                 (~/.cache without that variable)
$XDG_CACHE_HOME/trimtab/calibration/amd-epyc-7b13-2-threads.json
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from trimtab.facts.calibration import Calibration
from trimtab.facts.errors import ResourceError
from trimtab.facts.files import read_json_object, write_json

RATES, SECONDS, MAX_AMOUNT = (1e3, 1e18), (1e-12, 1e6), 1e24
"""Plausible ranges of measured bytes and FLOPs per second, of measured seconds, and of a sample's bytes and FLOPs: far
beyond any device, and within what arithmetic on them can represent."""
REMEDY = "run `trimtab plan --calibrate` to measure this machine again"


class CalibrationWarning(UserWarning):
    """A calibration file is ignored."""


def calibration_folder() -> Path:
    """Returns the folder of all calibrations; it may not exist.

    Example:
        >>> calibration_folder().name
        'calibration'
    """
    root = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification requires relative paths to be ignored.
    cache = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return cache / "trimtab" / "calibration"


def calibration_path(device_name: str, threads: int | None = None, folder: Path | None = None) -> Path:
    """Returns the path of a device's calibration.

    Args:
        device_name: as in `Calibration.device`.
        threads: number of threads of a CPU; None for a GPU.
        folder: used instead of `calibration_folder()`.

    Example:
        >>> calibration_path("NVIDIA H200", folder=Path("c")).as_posix()
        'c/nvidia-h200.json'
        >>> calibration_path("Some CPU @ 2.8GHz", 2, Path("c")).name
        'some-cpu-2.8ghz-2-threads.json'
    """
    words = re.findall(r"[a-z0-9.]+", device_name.lower()) or ["unnamed"]
    if threads is not None:
        words += [str(threads), "threads"]
    return (folder or calibration_folder()) / ("-".join(words) + ".json")


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Writes a calibration atomically: an interrupted write does not change the earlier file.

    Returns:
        The path of the file.

    Raises:
        ResourceError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> made = Calibration("a CPU", flops={"fp32": 1e11}, copy=2e10, launch_seconds=5e-6, threads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_calibration(made, Path(folder))
        ...     read_calibration("a CPU", 2, folder=Path(folder)) == made
        True
    """
    path = calibration_path(calibration.device, calibration.threads, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration.to_dict())
    except OSError as error:
        raise ResourceError(
            f"the calibration cannot be written to {path}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a writable folder",
        ) from error
    return path


def read_calibration(
    device_name: str,
    threads: int | None = None,
    *,
    folder: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Calibration | None:
    """Reads the calibration of a device; returns None if there is none or its file is unusable.

    Args:
        device_name: as in `Calibration.device`.
        threads: number of threads of a CPU; None for a GPU.
        folder: used instead of `calibration_folder()`.
        note: called with a message if a file is ignored; a Python warning by default.

    Example:
        >>> read_calibration("a GPU that was never measured") is None
        True
    """
    path = calibration_path(device_name, threads, folder)
    try:
        found = Calibration.from_dict(read_json_object(path))
        _check(found, device_name, threads)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"it is damaged or of another version ({type(error).__name__}: {error})"
    else:
        return found
    sentence = f"the calibration {path} is ignored: {problem}; {REMEDY}"
    if note is None:
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    else:
        note(sentence)
    return None


def _check(found: Calibration, device_name: str, threads: int | None) -> None:
    """Raises ValueError for values that cannot be measurements of this device: an edited or renamed file."""
    if found.device != device_name or found.threads != threads:
        raise ValueError(f"it is of {found.device!r} with {found.threads} threads")
    _check_texts(found)
    rates = [found.copy, *found.flops.values()]
    rates += [r for r in (found.to_host, found.from_host, found.disk_read, found.disk_write) if r is not None]
    seconds = [found.launch_seconds, *(sample.seconds for sample in found.samples)]
    amounts = [amount for sample in found.samples for amount in (sample.flops, sample.moved, *sample.dims)]
    if (
        not found.flops
        or not all(_is_within(rate, *RATES) for rate in rates)
        or not all(_is_within(value, *SECONDS) for value in seconds)
        or not all(_is_within(amount, 0, MAX_AMOUNT) for amount in amounts)
    ):
        raise ValueError("a measurement is missing, or not a plausible number")


def _check_texts(found: Calibration) -> None:
    texts = [found.measured_at, found.source, *found.warnings, *found.flops]
    texts += [text for pair in found.versions.items() for text in pair]
    texts += [text for sample in found.samples for text in (sample.dtype, sample.impl)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name or text is not a string")


def _is_within(value: object, low: float, high: float) -> bool:
    """Whether a value is a number in a range; NaN and booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
