"""What a run asks of torch for the whole process ends with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import write_recipe
from whole_run import Silent, run

from trimtab import launch
from trimtab.launch.preparing import prepare
from trimtab.recipe import load
from trimtab.run.choices import Choices
from trimtab.run.folder import read_json
from trimtab.run.torch_setup import set_up_torch, torch_put_back


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A GPU of 100 bytes, as far as settings of torch go."""
    found: dict[str, object] = {"share": 0.75, "emptied": 0}

    def emptied() -> None:
        found["emptied"] = int(str(found["emptied"])) + 1

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (90, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: found["share"])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share: found.update(share=share)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    return found


def choices(folder: Path, *, deterministic: bool, cap: int | None) -> Choices:
    made = prepare(load(write_recipe(folder))).choices
    return replace(
        made,
        device="cuda",
        deterministic=deterministic,
        threads=2,
        memory={**made.memory, "allocator_bytes": cap},
    )


@pytest.mark.parametrize("fails", [False, True])
def test_one_run_s_settings_are_not_the_next_one_s(
    tmp_path: Path, gpu: dict[str, object], fails: bool
) -> None:
    def one() -> None:
        with torch_put_back():
            set_up_torch(choices(tmp_path, deterministic=True, cap=40))
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            assert (torch.get_num_threads(), gpu["share"], gpu["emptied"]) == (2, 0.4, 0)
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            one()
    else:
        one()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert (torch.get_num_threads(), gpu["share"], gpu["emptied"]) == (1, 0.75, 1)


def test_kernels_that_cannot_repeat_their_bits_run_whatever_the_process_asked_for(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch_put_back():
        set_up_torch(choices(tmp_path, deterministic=False, cap=None))
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_process_that_wants_equal_bits_gets_them(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    folder = run(tmp_path, "run", max_steps=1, num_train_epochs=None)
    assert torch.are_deterministic_algorithms_enabled()
    assert read_json(folder / "choices.json")["deterministic"] is True
    assert load(folder / "recipe.yaml").deterministic is True


def test_threads_of_a_resumed_run_end_with_it(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    folder = run(tmp_path, "run", max_steps=2, num_train_epochs=None, save_steps=1)
    shutil.rmtree(folder / "checkpoints/step-00000002")
    torch.set_num_threads(1)
    seen = []
    launch.resume(folder, [], Silent(), after_step=lambda _: seen.append(torch.get_num_threads()))
    assert seen == [2]
    assert torch.get_num_threads() == 1
