"""One process of a mesh: trains recipes with the same code as a single-process run.

usage: mesh_rank.py FOLDER RANK SIZE
FOLDER has the recipes train.yaml, dropout.yaml, signal.yaml and poison.yaml, trained one after the other. Prints a JSON
object: how each ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from whole_run import Silent

from trimtab import text
from trimtab.facts.errors import TrimtabError
from trimtab.parallel import Mesh
from trimtab.plan.resolved import ParallelConfig
from trimtab.recipe import load
from trimtab.run import RunFolder, build_run
from trimtab.run.corpora import open_corpora
from trimtab.run.models import save_config_and_tokenizer
from trimtab.run.prepare import prepare


def poison(run: object, rank: int, at: int = 3) -> None:
    """From step `at` on, rank 1 (alone) computes NaN in its embeddings."""
    setup = run.setup  # type: ignore[attr-defined]
    calm = setup.loader.next_step

    def next_step() -> list:
        microbatches = calm()
        if setup.optimizer.count == at - 1 and rank == 1:
            setup.model.model.embed_tokens.register_forward_hook(lambda m, i, out: out * float("nan"))
        return microbatches

    setup.loader.next_step = next_step


def train(recipe_path: Path, rank: int) -> dict[str, str]:
    """Trains one recipe, as `trimtab.launch` does on a mesh."""
    mode = recipe_path.stem
    recipe = load(recipe_path)
    prepared = prepare(recipe)
    folder = RunFolder(Path(recipe.output_dir))
    weights = Path(recipe.model.name)
    tokenizer = text.load(weights)
    corpora = open_corpora(recipe, tokenizer, Silent())
    if rank == 0:
        folder.path.mkdir()
        save_config_and_tokenizer(weights, prepared.shape, tokenizer, folder.model, "fp32")
    dist.barrier()
    mesh = Mesh.world()
    run = build_run(
        recipe,
        dataclasses.replace(prepared.resolved, parallel=ParallelConfig(data=mesh.size)),
        prepared.shape,
        mesh,
        weights=weights,
        tokenizer=tokenizer,
        corpora=corpora,
        folder=folder,
        on_event=lambda text: None,
    )
    if mode == "poison":
        poison(run, rank)
    if mode == "signal" and rank == 1:
        run.setup.after_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None
    try:
        return {"status": run.train().status}
    except TrimtabError as error:
        return {"error": str(error)}


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    ended = {mode: train(folder / f"{mode}.yaml", rank) for mode in ("train", "dropout", "signal", "poison")}
    dist.destroy_process_group()
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
