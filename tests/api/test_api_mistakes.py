"""Mistakes of new users of the Python API: each is refused with a cause and a remedy, nothing is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_world import CHATS, TEXTS, quiet, tiny_recipe

import trimtab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    template = tiny_recipe(made)["model"]["chat_template"]
    (made / "model" / "chat_template.jinja").write_text(template)
    (made / "prompts.txt").write_text("the cat\n")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> trimtab.Model:
    return trimtab.load(folder / "model", dtype="fp32", device="cpu")


def refused(call: Any) -> str:
    with pytest.raises(trimtab.TrimtabError) as raised:
        call()
    assert raised.value.remedy
    return str(raised.value)


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(folder, output_dir=str(folder / "never"), **changes)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (["", ""], "data contains no documents: 2 empty were skipped; use a source that contains text"),
        (
            ["a cat sees"] * 10,
            "data contains 10 copies of one document of 7 tokens, too short to hold out a part; ",
        ),
        (
            CHATS[:1] * 4,
            "data contains 4 copies of one example, which cannot be split to hold out a part; add examples, ",
        ),
    ],
)
def test_rows_without_content_and_copies_of_one_row(folder: Path, data: Any, said: str) -> None:
    assert said in refused(lambda: trimtab.train(recipe(folder), data=data, view=quiet()))


@pytest.mark.parametrize(("given", "shown"), [(None, "None"), (5, "5, an int"), (b"a", "b'a', a bytes")])
def test_invalid_prompts(model: trimtab.Model, given: Any, shown: str) -> None:
    assert f"the prompt is {shown}; give a text, a conversation" in refused(lambda: model.generate(given))
    assert f"the text is {shown}; give a text, a conversation" in refused(lambda: model.loss(given))
    chat = model.chat(max_new_tokens=1)
    assert refused(lambda: chat.send(given)) == f"the message is {shown}; give a text"
    assert chat.messages == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"temperature": "0.7"}, "temperature is '0.7', a str; give a number: 0"),
        ({"temperature": True}, "temperature is True, a bool"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3', a str; give a whole number of at least 1"),
        ({"max_new_tokens": 3.5}, "max_new_tokens is 3.5, a float; give a whole number of at least 1"),
        ({"seed": "x"}, "seed is 'x', a str; give a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5, a float; give a whole number of at least 0"),
        ({"top_p": None}, "top_p is None; give a number above 0, at most 1"),
        ({"stop": 5}, "stop is 5, an int; give a text or a list of texts"),
        ({"max_tokens": 3}, "there is no option 'max_tokens'; did you mean 'max_new_tokens'?"),
        ({"do_sample": True}, "there is no option 'do_sample'; choose one of max_new_tokens, "),
    ],
)
def test_sampling_options_of_the_wrong_type(
    model: trimtab.Model, option: Any, said: str, folder: Path
) -> None:
    assert said in refused(lambda: model.generate("the cat", **option))
    assert said in refused(lambda: model.chat(**option))
    assert said in refused(lambda: model.generate_file(folder / "prompts.txt", folder / "o.jsonl", **option))


def test_other_options_than_sampling(model: trimtab.Model, folder: Path) -> None:
    assert "stream is True, a bool; give a function" in refused(lambda: model.generate("a", stream=True))
    for call in (model.generate, model.loss):
        assert refused(lambda call=call: call("a cat", batch_size="4")) == (
            "batch_size is '4', a str; give a whole number of at least 1"
        )
    assert "system is 5, an int; give a text" in refused(lambda: model.chat(system=5))
    prompts, output = folder / "prompts.txt", folder / "o.jsonl"
    assert "prompts is ['a'], a list" in refused(lambda: model.generate_file(["a"], output))
    assert "output is None" in refused(lambda: model.generate_file(prompts, None))
    assert "on_progress is True" in refused(lambda: model.generate_file(prompts, output, on_progress=True))
    assert "adapter is 5, an int" in refused(lambda: model.save_adapter(folder / "a", adapter=5))
    assert not output.exists()


def test_numbers_of_numpy_and_types_of_torch_are_accepted(model: trimtab.Model, folder: Path) -> None:
    plain = model.generate("the cat", max_new_tokens=3, temperature=0.5, seed=4, stop=None)
    options = {"max_new_tokens": np.int64(3), "temperature": np.float64(0.5), "seed": np.int32(4)}
    assert model.generate("the cat", **options) == plain
    again = trimtab.load(folder / "model", dtype=torch.float32, device=torch.device("cpu"))
    assert again.generate("the cat", **options) == plain
    expected = trimtab.plan_run(recipe(folder), data=TEXTS, max_steps=2, device="cpu")
    found = trimtab.plan_run(recipe(folder), data=TEXTS, max_steps=np.int64(2), device=torch.device("cpu"))
    assert found["memory"]["peak"] == expected["memory"]["peak"]  # what is free changes all the time


def test_saving_over_a_folder_names_python_arguments(model: trimtab.Model, folder: Path) -> None:
    model.save(folder / "saved")
    assert refused(lambda: model.save(folder / "saved")) == (
        f"{folder / 'saved'} exists already; choose another folder, or replace it with overwrite=True"
    )
    model.save(folder / "saved", overwrite=True)


def test_generate_file_errors_name_python_arguments(model: trimtab.Model, folder: Path) -> None:
    prompts, output = folder / "prompts.txt", folder / "answers.jsonl"
    model.generate_file(prompts, output, max_new_tokens=1)
    said = refused(lambda: model.generate_file(prompts, output, max_new_tokens=2))
    assert said.endswith("; name another output, or replace the file with overwrite=True")
    said = refused(lambda: model.generate_file(prompts, folder / "more.jsonl", system="be kind"))
    assert said.startswith("system is given, but ")
    assert said.endswith("; add chat=True, or put it into the prompt")


def test_a_model_is_shown_in_one_line(folder: Path, model: trimtab.Model) -> None:
    assert repr(model) == f"Model('{folder / 'model'}', llama, 28 K parameters, fp32, cpu)"
    lora = {"r": 2, "target_modules": ["q_proj"]}
    run = trimtab.train(
        tiny_recipe(folder, output_dir=str(folder / "lora"), max_steps=1), data=TEXTS, lora=lora, view=quiet()
    )
    shown = f"Model('{folder / 'lora'}' at step 1, llama, 28 K parameters, fp32, cpu, adapters: default)"
    assert repr(run.model()) == shown


@pytest.mark.parametrize("given", [TEXTS, [{"text": "a"}], "texts.jsonl", 5])
def test_data_in_a_recipe_that_is_not_a_mapping(folder: Path, given: Any) -> None:
    said = refused(lambda: trimtab.train({**recipe(folder), "data": given}, view=quiet()))
    assert said.startswith("'data' of the recipe is ")
    assert "trimtab.train(recipe, data=rows)" in said


def test_invalid_models(folder: Path, model: trimtab.Model) -> None:
    for given in (5, ["starter"], torch.nn.Linear(2, 2)):
        said = refused(
            lambda given=given: trimtab.train(recipe(folder), model=given, data=TEXTS, view=quiet())
        )
        assert said.startswith("model= is ")
        assert "the result of trimtab.load" in said
    said = refused(lambda: trimtab.train({**recipe(folder), "model": model}, data=TEXTS, view=quiet()))
    assert said.startswith("'model' of the recipe is Model(")
    assert "trimtab.train(recipe, model=model)" in said
    (folder / "recipe.yaml").write_text(json.dumps(recipe(folder)))
    said = refused(lambda: trimtab.train(folder / "recipe.yaml", model={"name": model}, data=TEXTS))
    assert said.startswith("model.name is Model(")
    assert not (folder / "never").exists()


def test_a_recipe_without_model_or_data_names_the_arguments(folder: Path) -> None:
    assert refused(lambda: trimtab.train(data=TEXTS, view=quiet())) == (
        "there is no model to train; pass model=, such as model='starter'"
    )
    assert refused(lambda: trimtab.train(model="starter", view=quiet())).startswith(
        "there is no data to train on; pass data=, such as data=['a text', 'another']"
    )
    said = refused(lambda: trimtab.train(modle="starter", data=TEXTS, view=quiet()))
    assert "'modle'" in said  # a misspelt key is reported instead
    said = refused(lambda: trimtab.train(model="starter", data="once upon a time", view=quiet()))
    assert said == (
        "data is the string 'once upon a time', but a string names a file, a folder or a dataset; give texts to "
        "train on as a list: data=[text]"
    )


def test_invalid_views_and_keys(folder: Path) -> None:
    said = refused(lambda: trimtab.train(recipe(folder), data=TEXTS, view=False))
    assert said == "view is False, a bool; give a trimtab.report.LiveView, or None for the terminal"
    said = refused(lambda: trimtab.resume(folder, view=quiet(), max_steps=object()))
    assert said.startswith("max_steps is <object")


def test_best_and_its_model_agree(folder: Path) -> None:
    """If no step improves on the initial model, there is no best checkpoint."""
    worse = tiny_recipe(folder, output_dir=str(folder / "worse"), learning_rate=0.9, eval_steps=1)
    run = trimtab.train(worse, data=TEXTS, view=quiet())
    assert min(run.evaluations, key=lambda one: one.loss).step == 0
    assert run.best is None
    assert "no valid checkpoint best" in refused(lambda: run.model("best"))
