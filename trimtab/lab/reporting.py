"""Reports of studies: measurements to a document, a document to files.

Measurements of different machines are kept apart: each machine has its own sections, and no table mixes two.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trimtab.facts.errors import DataError, ResourceError
from trimtab.facts.files import write_atomic
from trimtab.lab.records import file_name
from trimtab.lab.studies import TITLES, find_study
from trimtab.lab.study import Measurement
from trimtab.lab.sweep import read_measurements
from trimtab.report.document import Block, Code, Document, Section, Table, Text
from trimtab.report.document_markdown import PICTURES, markdown
from trimtab.report.document_page import write_document_page
from trimtab.report.pictures import write_pictures


def build_report(measurements: Sequence[Measurement], command: str, title: str | None = None) -> Document:
    """The report of all measurements.

    Args:
        measurements: of one or several studies, on one or several machines.
        command: the command that measured them, for the footer.
        title: of the report; the study's own by default.

    Raises:
        DataError: a measurement is of a study that this version does not have.

    Example:
        >>> build_report(measurements, "trimtab bench sizes").title                # doctest: +SKIP
        'Parameters of the study models'
    """
    unknown = sorted({m.cell.study for m in measurements} - set(TITLES))
    if unknown:
        raise DataError(
            f"there are records of {', '.join(unknown)}, a study that this version of trimtab does not have",
            f"give records of these studies: {', '.join(TITLES)}",
        )
    machines = list(dict.fromkeys(m.machine.name for m in measurements))
    studies = [name for name in TITLES if any(m.cell.study == name for m in measurements)]
    sections: list[Section] = []
    for machine in machines:
        for name in studies:
            study_measurements = [
                m for m in measurements if m.cell.study == name and m.machine.name == machine
            ]
            study_sections = find_study(name).sections(study_measurements) if study_measurements else []
            if len(studies) > 1:
                study_sections = [replace(one, title=f"{name}: {one.title}") for one in study_sections]
            sections += (
                [_of_machine(section, machine) for section in study_sections]
                if len(machines) > 1
                else study_sections
            )
    heading = title or (TITLES[studies[0]] if len(studies) == 1 else "Studies")
    return Document(heading, _facts(measurements), tuple(_distinct_ids(sections)), command)


def read_report(paths: Sequence[Path], command: str) -> tuple[Document, list[Measurement], int]:
    """(the report of record files or folders, their measurements, damaged lines that were left out).

    Raises:
        DataError: a path has no measurement, or its records are of another version of trimtab.
    """
    measurements, damaged = read_measurements(paths)
    try:
        return build_report(measurements, command), measurements, damaged
    except (KeyError, TypeError) as error:  # the records lack a field that this version reports
        raise DataError(
            f"the records are of another version of trimtab: {type(error).__name__}: {error}",
            "measure again with this version and another --out",
        ) from error


def _of_machine(section: Section, machine: str) -> Section:
    """The section with the machine's name in the heading and in the ids of its charts."""
    suffix = f"-{file_name(machine).replace('.', '-')}"
    return Section(
        f"{section.title} ({machine})", tuple(_with_id(block, suffix=suffix) for block in section.blocks)
    )


def _distinct_ids(sections: Sequence[Section]) -> list[Section]:
    """Makes chart ids unique: charts of several studies may share an id, and later ones get a number."""
    counts: dict[str, int] = {}
    distinct = []
    for section in sections:
        blocks: list[Block] = []
        for block in section.blocks:
            if isinstance(block, Text | Code | Table):
                blocks.append(block)
                continue
            counts[block.id] = counts.get(block.id, 0) + 1
            times = counts[block.id]
            blocks.append(_with_id(block, suffix=f"-{times}") if times > 1 else block)
        distinct.append(replace(section, blocks=tuple(blocks)))
    return distinct


def _with_id(block: Block, *, suffix: str) -> Block:
    return block if isinstance(block, Text | Code | Table) else replace(block, id=block.id + suffix)


def _facts(measurements: Sequence[Measurement]) -> tuple[str, ...]:
    """Machines, commits and days, each once."""
    names = list(dict.fromkeys(m.machine.name for m in measurements))
    commits = [name for name in dict.fromkeys(m.commit for m in measurements) if name not in ("", "unknown")]
    days = sorted({m.time[:10] for m in measurements})
    facts = [*names]
    if commits:
        facts.append(f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
    if days:
        facts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return tuple(facts)


def prepare_folder(folder: Path) -> None:
    """Makes the folder of a study's records and report, before anything is measured.

    Raises:
        ResourceError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(error, folder) from None


def write_report(document: Document, folder: Path) -> list[Path]:
    """Writes report.md, report.html and, with matplotlib, pictures/*.png; returns the paths of these files.

    Raises:
        ResourceError: the folder cannot be written.

    Example:
        >>> write_report(build_report(measurements, "trimtab bench step"), Path("lab/step"))  # doctest: +SKIP
        [PosixPath('lab/step/report.md'), PosixPath('lab/step/report.html')]
    """
    target, page = folder / "report.md", folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = write_pictures(document, folder / PICTURES)
        write_atomic(target, markdown(document, [picture.stem for picture in pictures]))
    except OSError as error:
        raise _unwritable(error, folder) from None
    write_document_page(document, page)
    return [target, page, *pictures]


def _unwritable(error: OSError, folder: Path) -> Exception:
    if error.errno == errno.ENAMETOOLONG:  # the command line shortens it
        return error
    return ResourceError(f"{folder} cannot be written: {error.strerror}", "give another place with --out")
