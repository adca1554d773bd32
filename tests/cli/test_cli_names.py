"""Invalid names on the command line and in Python: texts, empty strings, numbers, misspelt verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import Call, World

import trimtab
from trimtab.facts.errors import CheckpointError, DataError, HubError, ModelError, RecipeError

LONG = "Once upon a time there was a text that was passed as a name. " * 100
NAMES = [LONG, "x" * 300, "~no-such-user-here/x"]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_where_a_name_is_expected(
    cli: Call, world: World, job: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    for code, *words in (
        (2, "train", name),
        (2, "plan", name),
        (2, "train", world.recipe, f"data.train={name}"),
        (2, "plan", world.recipe, f"model={name}"),
        (2, "train", world.recipe, f"model.tokenizer={name}"),
        (2, "plan", world.recipe, f"lora.adapter={name}"),
        (2, "train", world.recipe, f"output_dir={name}"),
        (2, "train", job(), f"model.chat_template={name}"),
        (2, "generate", name, "hello"),
        (2, "generate", world.model, "hello", "--adapter", name),
        (2, "eval", name, "--no-probe", "starter:general"),
        (3, "eval", world.model, name, "--no-probe"),
        (2, "export", "hf", name, tmp_path / "a"),
        (2, "export", "hf", world.run, name),
        (2, "export", "peft", world.run, name),
        (2, "merge", name, tmp_path / "a"),
        (2, "runs", name),
        (2, "train", "--resume", name),
        (2, "eval", world.model, "starter:general", "--no-probe", "--cache-dir", name),
    ):
        result = cli(*words)
        result.refused(code)
        assert len(result.err) < 500, result.err


@pytest.mark.parametrize("name", ["x" * 300, "a" * 5000])
def test_run_folders_by_names_that_are_too_long(cli: Call, world: World, name: str) -> None:
    cli("train", "--resume", name).refused(2, "too long for a file name")
    cli("report", name).refused(2, "too long for a file name")
    cli("report", world.run, "--out", name).refused(2, "too long for a file name")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "own-txt"), "there is no recipe at own-txt; did you mean own-text, which ships with"),
        (
            ("train", "a/own-txt"),
            "there is no recipe at a/own-txt; check the path, or name a recipe that ships",
        ),
        (("help", "trian"), "there is no command 'trian'; did you mean `trimtab train`?"),
        (("trian", "x.yaml"), "there is no command 'trian'; did you mean `trimtab train`?"),
        (("generat",), "did you mean `trimtab generate`?"),
        (("recipe.yaml", "a=1"), "did you mean `trimtab train recipe.yaml`?"),
        (
            ("version",),
            f"'version' (this is trimtab {trimtab.__version__}); did you mean `trimtab --version`?",
        ),
        (("resume", "runs/a"), "there is no command 'resume'; did you mean `trimtab train --resume RUN`?"),
        (("fly",), "the commands are demo, train, plan"),
    ],
)
def test_unknown_verbs(cli: Call, words: tuple[str, ...], message: str) -> None:
    cli(*words).refused(2, message)


@pytest.mark.parametrize("wrong", [None, 5, 2.5, ["a"], b"a", "", "a\0b"])
def test_wrong_types_from_python(wrong: Any, tmp_path: Path) -> None:
    """`bytes` name a file that does not exist; the other values are not valid names."""
    calls: list[Callable[[], Any]] = [
        lambda: trimtab.load(wrong),
        lambda: trimtab.train(wrong),
        lambda: trimtab.plan_run(wrong),
        lambda: trimtab.resume(wrong),
    ]
    for call in calls:
        with pytest.raises((RecipeError, ModelError, CheckpointError, DataError)) as caught:
            call()
        assert not isinstance(caught.value, HubError)
        assert len(str(caught.value)) < 300


def test_other_arguments_of_wrong_types(world: World) -> None:
    for options in ({"adapter": 5}, {"revision": 5}, {"dtype": 5}, {"device": 5}, {"adapter": ""}):
        with pytest.raises(RecipeError):
            trimtab.load(world.model, **options)  # type: ignore[arg-type]
    model = trimtab.load(world.model, dtype="float32")
    for folder in (None, 5, LONG):
        with pytest.raises(RecipeError, match=r"^the folder is "):
            model.save(folder)  # type: ignore[arg-type]
        with pytest.raises(RecipeError, match=r"^the adapter is "):
            model.add_adapter(folder, "a")  # type: ignore[arg-type]


def test_texts_as_sources_from_python(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a list of strings, which name files and data sets") as caught:
        trimtab.plan_run({"model": str(world.model), "data": {"train": [LONG]}})
    assert len(str(caught.value)) < 300


def test_paths_and_none_from_python(world: World) -> None:
    from trimtab.api.training import build_recipe_from_arguments

    given = {"eval_steps": None, "learning_rate": None, "num_train_epochs": None}
    recipe, _ = build_recipe_from_arguments(world.recipe, given, None, world.model)
    assert recipe.learning_rate == 2e-5
    assert recipe.eval_steps is None
    assert recipe.max_steps == 6
    assert recipe.model.name == str(world.model)


def test_the_beginning_of_each_trained_source_is_shown(
    world: World, cli: Call, job: Callable[..., Path]
) -> None:
    recipe = job()
    source = recipe.parent / "rows.csv"
    source.write_text("id;body\n" + "".join(f"{i};the cat sees the dog {i}\n" for i in range(30)))
    result = cli("train", recipe, f"data.train={source}", f"output_dir={recipe.parent / 'run'}")
    assert result.code == 0, result.err
    flat = " ".join(result.out.split())
    assert "text column 'body', separated by semicolons; first document: 'the cat sees the dog 0'" in flat


def test_the_starters_replay_is_for_the_starter(world: World, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("the cat sees the dog. " * 50)
    words = ("own-text", f"data.train={tmp_path / 'my.txt'}", "max_seq_length=64")
    result = cli("plan", *words, f"model.name={world.model}")
    result.refused(2, "starter:replay", "data.replay=null", "data.replay.sources=[./general-text]")
    assert cli("plan", *words, f"model.name={world.model}", "data.replay=null").code == 0
    (tmp_path / "no-model").mkdir()
    cli("plan", *words, f"model.name={tmp_path / 'no-model'}").refused(4, "has no config.json")
    general = f"data.replay.sources=['{tmp_path / 'my.txt'}']"
    assert cli("plan", *words, f"model.name={world.model}", general).code == 0
    assert cli("plan", *words).code == 0


def test_a_model_that_came_from_the_starter_keeps_its_replay(cli: Call, tmp_path: Path) -> None:
    from trimtab.starter import base_folder

    (tmp_path / "my.txt").write_text("the cat sees the dog. " * 50)
    copy = tmp_path / "copy"
    copy.symlink_to(base_folder())
    assert cli("plan", "own-text", f"data.train={tmp_path / 'my.txt'}", f"model.name={copy}").code == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", 2**40),
        ("eos_token_id", 10**400),
        ("bos_token_id", -1),
        ("text_config", "x"),
        ("text_config", [1]),
    ],
)
def test_token_ids_of_a_damaged_config(model_copy: Path, key: str, value: Any) -> None:
    from trimtab import text

    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (model_copy / name).unlink(missing_ok=True)
    path = model_copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    if key == "eos_token_id":
        with pytest.raises(ModelError, match="eos_token_id is 1"):
            text.load(model_copy)
    else:
        text.load(model_copy)
