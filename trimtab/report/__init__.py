"""The live terminal output of a run, and its HTML report, which is built only from the files in the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.report.live import LiveView
    from trimtab.report.page import write_page
    from trimtab.report.rundata import RunData, read_run

_MODULES = {"LiveView": "live", "RunData": "rundata", "read_run": "rundata", "write_page": "page"}

__all__ = ["LiveView", "RunData", "read_run", "write_page"]

__getattr__ = lazy_attributes(__name__, _MODULES)
