"""Dtypes under autocast, as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.lab.numerics.autocast import AutocastStudy, TracedModel
from trimtab.lab.numerics.formats import FORMATS
from trimtab.lab.numerics.norms import WIDTH, NormRow
from trimtab.report.document import Document, Section, Table, Text
from trimtab.run.dtype_trace import TracedOperation

MOVES = ("_unsafe_view", "clone", "ones_like", "detach", "copy_")
"""Operations that compute nothing; views are left out too."""
CAST = "_to_copy"
FIRST_BLOCK = "model.layers.0"
BLOCKS = "model.layers."

Signature = tuple[tuple[str, str, str, int], ...]
"""(operation, inputs, output, count) of every operation of a module."""


def autocast_document(
    study: AutocastStudy, facts: Sequence[str] = (), command: str = "trimtab numerics autocast"
) -> Document:
    """The report.

    Example:
        >>> from trimtab.lab.numerics.autocast import study_autocast
        >>> autocast_document(study_autocast("bf16")).title
        'Autocast to bf16 on cpu'
    """
    toy, decoder = study.models
    sections = (
        _questions(study),
        Section("Operations of the toy model", (_forward(toy), _backward(toy))),
        Section(
            "Operations of trimtab's decoder",
            (
                Text(
                    "One block and the layers outside blocks, without views and copies. Autocast casts the input and "
                    "the weight of each matrix product; the residual stream, norms, softmax and loss stay in fp32."
                    if _stays_wide(decoder)
                    else "One block and the layers outside blocks, without views and copies."
                ),
                _forward(decoder),
                _backward(decoder),
            ),
        ),
        _norms(study.norms),
    )
    return Document(f"Autocast to {study.dtype} on {study.device}", tuple(facts), sections, command)


def _questions(study: AutocastStudy) -> Section:
    toy, decoder = study.models
    rows = (
        ("parameters", toy.parameters, decoder.parameters),
        ("first linear layer's output", toy.first_layer, decoder.first_layer),
        ("first norm's output", toy.norm, decoder.norm),
        ("logits", toy.logits, decoder.logits),
        ("loss", toy.loss, decoder.loss),
        ("gradients", toy.gradients, decoder.gradients),
    )
    table = Table("Dtypes of one step", ("tensor", toy.name, decoder.name), rows)
    return Section("The dtype of each tensor", (Text(_answer(toy)), table, Text(_decoder_answer(decoder))))


def _answer(toy: TracedModel) -> str:
    """Whether autocast was observed to run the toy model's norm in fp32."""
    text = (
        "The toy model is linear → ReLU → LayerNorm → linear with cross entropy. Autocast changes no parameter: it "
        "casts the inputs of single operations while they run."
    )
    if toy.norm == "fp32":
        return f"{text} On this device layer_norm is among those that it runs in fp32."
    return (
        f"{text} On this device layer_norm is not among those that it runs in fp32, and its output stays {toy.norm}; "
        "autocast for CUDA GPUs runs it in fp32."
    )


def _decoder_answer(decoder: TracedModel) -> str:
    if not decoder.norm == decoder.logits == decoder.gradients == decoder.parameters == "fp32":
        return f"The decoder's norms return {decoder.norm}, its logits are {decoder.logits}."
    return (
        "trimtab's decoder does not depend on that list: its residual stream has the weights' dtype, norms compute "
        "in it, and the loss takes fp32 logits. Gradients have the dtype of their parameters."
    )


def _stays_wide(decoder: TracedModel) -> bool:
    names = ("rsqrt", "_softmax", "_log_softmax")
    seen = [
        operation for operation, _ in decoder.operations if operation.name in names and not operation.backward
    ]
    return bool(seen) and all(operation.output == "fp32" for operation in seen)


def _computes(operation: TracedOperation) -> bool:
    return not operation.is_view and operation.name not in MOVES


def _forward(model: TracedModel) -> Table:
    """A row for each operation of each module; modules with the same operations share their rows."""
    modules: dict[str, list[tuple[str, str, str, int]]] = {}
    for operation, times in model.operations:
        other_block = operation.module.startswith(BLOCKS) and not f"{operation.module}.".startswith(
            f"{FIRST_BLOCK}."
        )
        if operation.backward or other_block or not _computes(operation):
            continue
        modules.setdefault(operation.module, []).append(
            (operation.name, operation.inputs, operation.output, times)
        )
    alike: dict[Signature, list[str]] = {}
    for module, operations in modules.items():
        alike.setdefault(tuple(operations), []).append(_short(module))
    rows = []
    for signature, names in alike.items():
        for place, (name, inputs, output, times) in enumerate(signature):
            shown = ", ".join(names) if place == 0 else ""
            rows.append((shown, _operation(name), inputs, output, str(times)))
    return Table("Forward", ("module", "operation", "inputs", "output", "times"), tuple(rows))


def _short(module: str) -> str:
    """A module's path without the prefix that all of them share."""
    if not module:
        return "outside of modules"
    if module == FIRST_BLOCK:
        return "block: residual stream"
    return module.removeprefix(f"{FIRST_BLOCK}.").removeprefix("model.")


def _operation(name: str) -> str:
    return "cast" if name == CAST else name


def _backward(model: TracedModel) -> Table:
    counts: dict[tuple[str, str, str], int] = {}
    for operation, times in model.operations:
        if operation.backward and _computes(operation):
            key = (_operation(operation.name), operation.inputs, operation.output)
            counts[key] = counts.get(key, 0) + times
    rows = tuple((*key, str(times)) for key, times in sorted(counts.items()))
    return Table(
        "Backward, all modules",
        ("operation", "inputs", "output", "times"),
        rows,
        note="Each operation's backward runs in the dtype of its forward pass, outside of the autocast region.",
    )


def _norms(rows: Sequence[NormRow]) -> Section:
    largest = FORMATS["fp16"].largest
    text = (
        f"A norm adds up squares. The square of an activation is beyond fp16 from {math.sqrt(largest):.0f} on, and the "
        f"sum of {WIDTH} squares from a root mean square of {math.sqrt(largest / WIDTH):.1f} on; bf16 has the range, "
        "but a sum in it drops every square below half of its spacing. Both RMSNorms below get the same 16-bit "
        "activations and are compared with fp64; one rounds every step to 16 bits, the other computes in fp32 and "
        "rounds the result, as trimtab's do."
    )
    table = Table(
        f"RMSNorm of {WIDTH} activations",
        (
            "dtype",
            "activations (rms)",
            "squares = inf",
            "squares = 0",
            "mean square",
            "by torch's mean",
            "added one by one",
            "error, 16-bit steps",
            "error, fp32 inside",
        ),
        tuple(
            (
                row.format,
                f"{row.scale:g}",
                f"{row.overflowed:.1%}",
                f"{row.vanished:.1%}",
                f"{row.mean_square:.4g}",
                f"{row.torch_mean_square:.4g}",
                f"{row.sequential_mean_square:.4g}",
                f"{row.error:.2g}",
                f"{row.error_fp32_inside:.2g}",
            )
            for row in rows
        ),
        note=(
            "Errors are relative. Where a square is infinite the norm divides by infinity: the output is 0 and the "
            "error 1. torch's mean adds 16-bit squares up in fp32 inside."
        ),
    )
    return Section("Why norms stay in fp32", (Text(text), table, Text(_norm_lesson(rows))))


def _norm_lesson(rows: Sequence[NormRow]) -> str:
    """Summarizes the table."""
    sentences = []
    for name in ("fp16", "bf16"):
        dtype_rows = [row for row in rows if row.format == name]
        lost = [row for row in dtype_rows if row.error > 0.5]
        factor = sorted(row.error / row.error_fp32_inside for row in dtype_rows)[len(dtype_rows) // 2]
        part = f"In {name} the steps in 16 bits make the error {factor:.1f} times as large in the median row"
        if lost:
            part += f", and the signal is lost from activations of {lost[0].scale:g} on"
        sentences.append(f"{part}.")
    worst = max(rows, key=lambda row: row.error_fp32_inside)
    sentences.append(
        f"With fp32 inside no error is above {worst.error_fp32_inside:.2g}, the last rounding's."
    )
    return " ".join(sentences)
