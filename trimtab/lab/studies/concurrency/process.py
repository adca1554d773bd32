"""A process with a model: loads it, reports that it is ready, generates on a signal, and returns its result.

    python -m trimtab.lab.studies.concurrency.process

It reads and writes JSON lines. Input: the order, {"way", "workers", "threads", "model", "device", "max_new_tokens",
"prompts"}; then an empty line, the signal to generate; the process ends with its input. Output: {"ready": true}; then
{"digests", "tokens", "bytes"}: a digest of each completion, the number of generated tokens, and peak resident memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from trimtab.lab.studies.concurrency.ways import Way, generate_all


def main() -> int:
    """Serves one order, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to standard error
    order = json.loads(sys.stdin.readline())
    generate = prepare(order)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    if not sys.stdin.readline():
        return 0
    print(json.dumps(generate()), file=answers, flush=True)
    sys.stdin.read()
    return 0


def prepare(order: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Loads the model and completes one prompt as a warm-up; returns the function that generates the answer."""
    import torch

    from trimtab.api import load

    if not order["device"].startswith("cuda"):
        torch.set_num_threads(order["threads"])
    model = load(order["model"], device=order["device"])
    limit = {"max_new_tokens": order["max_new_tokens"]}
    prompts: list[str] = order["prompts"]
    model.complete(prompts[:1], max_new_tokens=2)

    def generate() -> dict[str, Any]:
        completions = generate_all(
            Way(order["way"]),
            prompts,
            order["workers"],
            lambda prompt: model.complete(prompt, **limit),
            lambda texts: model.complete(texts, **limit),
        )
        return {
            "digests": [digest(completion.text) for completion in completions],
            "tokens": sum(len(completion.ids) for completion in completions),
            "bytes": peak_bytes_of_process(),
        }

    return generate


def digest(text: str) -> str:
    """A digest of twelve characters.

    Example:
        >>> digest(" 4") == digest(" 4"), len(digest(" 5"))
        (True, 12)
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def peak_bytes_of_process() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


if __name__ == "__main__":
    sys.exit(main())
