"""Adapters on a decoder: unchanged names, correct gradients, minimal saved tensors, invalid settings raise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lora_cases import IDS_BT, TIED, UNTIED, adapted, base, logits, scatter

from trimtab.adapt import (
    LoraSettings,
    active_adapters,
    adapter_names,
    add_adapters,
    create_dropout_masks,
    init_adapters,
    lora_dropout,
    quantize_layout,
    remove_adapter,
    trained_parameters,
    use_adapters,
)
from trimtab.adapt import spec as adapt_spec
from trimtab.adapt.lora_dropout import DropoutMasks, keep_mask
from trimtab.adapt.lora_products import add_lora, lora_linear
from trimtab.adapt.saved_modules import store_modules
from trimtab.facts.errors import RecipeError
from trimtab.model import build, init_weights

VARIANTS = {
    "plain": LoraSettings(r=4, lora_alpha=8),
    "rslora": LoraSettings(r=4, lora_alpha=8, use_rslora=True),
    "dora": LoraSettings(r=4, lora_alpha=8, use_dora=True),
    "names": LoraSettings(r=3, target_modules=("q_proj", "model.layers.1.mlp.down_proj")),
    "pattern": LoraSettings(r=3, target_modules=r".*\.layers\.1\..*_proj"),
    "ranks": LoraSettings(r=2, rank_pattern={"down_proj": 5}, alpha_pattern={r"layers\.0\..*q_proj": 3.0}),
    "whole": LoraSettings(r=2, target_modules=("q_proj",), modules_to_save=("embed_tokens", "norm")),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", [TIED, UNTIED], ids=["tied", "untied"])
def test_names_do_not_change_and_the_spec_lists_trained_parameters(name, shape) -> None:
    settings = VARIANTS[name]
    decoder = add_adapters(build(shape, dtype="bf16", device="meta", attention="reference"), settings)
    names = [n for n, _ in decoder.named_parameters() if ".lora_" not in n]
    assert names == [n for n, _ in shape.parameters()]
    declared = {
        n: (dims, dtype) for n, dims, dtype in adapt_spec.trainable_parameters(shape, settings, "bf16")
    }
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    real = {n: (tuple(p.shape), short[p.dtype]) for n, p in trained_parameters(decoder).items()}
    assert real == declared


@pytest.mark.parametrize("name", VARIANTS)
def test_a_new_adapter_does_not_change_the_output(name: str) -> None:
    decoder = base(UNTIED)
    before = logits(decoder)
    add_adapters(decoder, VARIANTS[name])
    init_adapters(decoder, seed=0)
    torch.testing.assert_close(logits(decoder), before, rtol=2e-6, atol=2e-6)
    scatter(decoder)
    assert not torch.allclose(logits(decoder), before, atol=1e-3)


def test_initialization_depends_only_on_seed_and_name() -> None:
    one, two = (add_adapters(base(), LoraSettings(r=4)) for _ in range(2))
    init_adapters(one, seed=5)
    init_adapters(two, seed=5)
    first, second = trained_parameters(one), trained_parameters(two)
    assert all(torch.equal(first[n], second[n]) for n in first)
    init_adapters(two, seed=6)
    a = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(first[a], second[a])
    assert first[a].abs().max() <= 32**-0.5
    assert float(first[a].detach().std()) == pytest.approx(32**-0.5 / 3**0.5, rel=0.15)


def test_gradients_match_the_formula() -> None:
    torch.manual_seed(0)
    x, a, b = (torch.randn(*d, dtype=torch.float64, requires_grad=True) for d in ((2, 5, 7), (3, 7), (6, 3)))
    weight, bias = torch.randn(6, 7, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, bias, a, b, 0.7), (x, a, b))
    assert torch.autograd.gradcheck(lambda x, a, b: add_lora(x @ weight.T, x, a, b, 0.7), (x, a, b))
    key = DropoutMasks(["a"], torch.device("cpu")).words_K5[0]
    dropped = lambda x, a, b: add_lora(x @ weight.T, x, a, b, 0.7, p=0.4, key_5=key)  # noqa: E731
    assert torch.autograd.gradcheck(dropped, (x, a, b))
    plain = x @ weight.T + bias + 0.7 * (x @ a.T) @ b.T
    torch.testing.assert_close(lora_linear(x, weight, bias, a, b, 0.7), plain)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_models_gradients_match_plain_operations(name: str) -> None:
    """fp64, against the merged weight computed by autograd: the layer's own backward, DoRA's constant norm."""
    settings = VARIANTS[name]
    shape = UNTIED
    decoder = adapted(settings, shape, dtype="fp64")
    for parameter in decoder.parameters():
        parameter.data = parameter.data.double()
    trained = trained_parameters(decoder)
    decoder.loss(IDS_BT, IDS_BT).backward()
    ours = {n: p.grad.clone() for n, p in trained.items()}
    for p in trained.values():
        p.grad = None
    plain = init_weights(build(shape, dtype="fp64", device="cpu", attention="reference"), seed=0)
    weights = dict(decoder.named_parameters())
    for target in adapt_spec.resolve_targets(shape, settings):
        a, b = (weights[f"{target.name}.lora_{f}.default.weight"] for f in "AB")
        weight = weights[f"{target.name}.weight"] + target.scaling * b @ a
        if settings.use_dora:
            lengths = weights[f"{target.name}.lora_magnitude_vector.default.weight"]
            weight = weight * (lengths / weight.detach().norm(dim=1))[:, None]
        weights[f"{target.name}.weight"] = weight
    weights = {n: w for n, w in weights.items() if ".lora_" not in n}

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner.loss(ids, ids)

    inner = {f"inner.{n}": w for n, w in weights.items()}
    torch.func.functional_call(Loss(), inner, (IDS_BT,)).backward()
    for n, p in trained.items():
        torch.testing.assert_close(ours[n], p.grad, rtol=1e-6, atol=1e-9, msg=n)


def test_only_x_and_its_thin_product_are_saved() -> None:
    """Except weights, autograd saves the layer's input and x·A, whatever the dtypes."""
    x = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    weight, a, b = torch.randn(40, 48, dtype=torch.bfloat16), torch.randn(4, 48), torch.randn(40, 4)
    a.requires_grad_(), b.requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        lora_linear(x, weight, None, a, b, 2.0)
    inputs = {t.data_ptr() for t in (x, weight, a, b)}
    extra = [tuple(t.shape) for t in saved if t.data_ptr() not in inputs]
    assert extra == [(64, 4)]


def test_masks_are_reproducible_and_unbiased() -> None:
    masks = DropoutMasks(["one", "two"], torch.device("cpu"))
    masks.set(0, step=3, first_sequence=1, tokens=2000)
    first = keep_mask(2000, 256, masks.words_K5[0], 0.1)
    masks.set(0, step=3, first_sequence=2, tokens=2000)
    assert not torch.equal(keep_mask(2000, 256, masks.words_K5[0], 0.1), first)
    masks.set(0, step=3, first_sequence=1, tokens=2000)
    assert torch.equal(keep_mask(2000, 256, masks.words_K5[0], 0.1), first)
    other = keep_mask(2000, 256, masks.words_K5[1], 0.1)
    for mask in (first, other):
        # 512,000 draws: the mean is within 4 standard deviations, rows and columns have the expected spread.
        assert float(mask.float().mean()) == pytest.approx(0.9, abs=4 * (0.09 / mask.numel()) ** 0.5)
        assert float(mask.float().mean(0).std()) == pytest.approx((0.09 / 2000) ** 0.5, rel=0.2)
        assert float(mask.float().mean(1).std()) == pytest.approx((0.09 / 256) ** 0.5, rel=0.1)
    pairs = ((first, other), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]))
    for one, two in pairs:
        together = torch.corrcoef(torch.stack([one.flatten().float(), two.flatten().float()]))[0, 1]
        assert abs(float(together)) < 4 / one.numel() ** 0.5


@pytest.mark.parametrize("p", [1 - 2.0**-30, 1 - 2.0**-32, 1 - 2.0**-53])
def test_a_dropout_close_to_one_drops_nearly_everything(p: float) -> None:
    key_5 = DropoutMasks(["one"], torch.device("cpu")).words_K5[0]
    assert not bool(keep_mask(100, 100, key_5, p).any())


def test_chunked_masks_equal_the_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    key_5 = DropoutMasks(["one"], torch.device("cpu")).words_K5[0]
    x = torch.randn(37, 24)
    whole = lora_dropout.apply_dropout(x, key_5, 0.3)
    monkeypatch.setattr(lora_dropout, "DROPOUT_CHUNK", 100)
    assert torch.equal(lora_dropout.apply_dropout(x, key_5, 0.3), whole)
    assert 0.2 < float((whole == 0).float().mean()) < 0.4


def test_dropout_is_the_same_when_recomputed_and_off_when_evaluating() -> None:
    from trimtab.adapt import recompute

    settings = LoraSettings(r=4, lora_dropout=0.3)
    decoder = adapted(settings)
    masks = create_dropout_masks(decoder, torch.device("cpu"))
    assert masks is not None
    grads = []
    for policy in ("none", "block"):
        recompute.apply(decoder, [policy] * len(decoder.model.layers))
        masks.set(1, step=2, first_sequence=0, tokens=20)
        loss = decoder.train().loss(IDS_BT, IDS_BT)
        loss.backward()
        grads.append((loss.detach(), {n: p.grad for n, p in trained_parameters(decoder).items()}))
        for p in trained_parameters(decoder).values():
            p.grad = None
    assert torch.equal(grads[0][0], grads[1][0])
    assert all(torch.equal(g, grads[1][1][n]) for n, g in grads[0][1].items())
    masks.set(1, step=3, first_sequence=0, tokens=20)
    assert not torch.equal(decoder.loss(IDS_BT, IDS_BT), grads[0][0])
    decoder.eval()
    assert torch.equal(logits(decoder), logits(adapted(LoraSettings(r=4)).eval()))


def test_several_adapters_are_switched_and_added() -> None:
    decoder = base()
    plain = logits(decoder)
    for index, name in enumerate(("one", "two")):
        add_adapters(decoder, LoraSettings(r=2 + index), adapter=name)
        init_adapters(decoder, seed=index, adapter=name)
        scatter(decoder, name, seed=index)
    assert adapter_names(decoder) == ["one", "two"]
    assert active_adapters(decoder) == ["two"]
    assert all(".two." in name for name in trained_parameters(decoder))
    two = logits(decoder)
    use_adapters(decoder, "one")
    one = logits(decoder)
    use_adapters(decoder, [])
    assert torch.equal(logits(decoder), plain)
    use_adapters(decoder, ["one", "two"])
    both = logits(decoder)
    assert not torch.allclose(one, two, atol=1e-3)
    assert not torch.allclose(both, one, atol=1e-3)
    use_adapters(decoder, "two")
    assert torch.equal(logits(decoder), two)
    with pytest.raises(RecipeError, match="no adapter three; it has one, two"):
        use_adapters(decoder, "three")


def test_adapters_that_cannot_be_combined_leave_the_active_ones() -> None:
    decoder = base(UNTIED)
    for name, dora in (("one", False), ("two", False), ("long", True)):
        add_adapters(decoder, LoraSettings(r=2, target_modules=("q_proj",), use_dora=dora), adapter=name)
        init_adapters(decoder, seed=0, adapter=name)
    add_adapters(decoder, LoraSettings(r=2, target_modules=("model.layers.0.mlp.up_proj",)), adapter="few")
    init_adapters(decoder, seed=0, adapter="few")
    for name in ("one", "two"):
        store_modules(decoder, name, {"lm_head.weight": torch.full((97, 32), 0.1 * len(name))})
    use_adapters(decoder, "few")
    before = logits(decoder)
    for names, words in ((["one", "two"], "both replace lm_head"), (["one", "long"], "DoRA")):
        with pytest.raises(RecipeError, match=words):
            use_adapters(decoder, names)
        assert active_adapters(decoder) == ["few"]
        assert torch.equal(logits(decoder), before)


def test_a_deep_copy_shares_no_tensor() -> None:
    decoder = adapted(LoraSettings(r=2))
    other = copy.deepcopy(decoder)
    before = logits(decoder)
    scatter(other, seed=9)
    other.model.layers[0].self_attn.q_proj.weight.data.zero_()
    assert torch.equal(logits(decoder), before)
    assert not torch.allclose(logits(other), before, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ("q_proj", "query")}, ["no query", "q_proj", "down_proj", "lm_head"]),
        ({"target_modules": r"layers\.0\.q_proj"}, ["no module's full name matches", "q_proj"]),
        ({"target_modules": "all-linar("}, ["not a regular expression"]),
        ({"r": 0}, ["lora.r is 0"]),
        ({"r": 33}, ["lora.r is 33", "with a maximum rank of 32", "rank_pattern"]),
        ({"r": 2, "rank_pattern": {"gate": 4}}, ["names gate", "gate_proj"]),
        ({"r": 2, "modules_to_save": ("head",)}, ["no head", "lm_head", "input_layernorm"]),
        ({"r": 2, "modules_to_save": ("q_proj",)}, ["both in lora.target_modules"]),
        ({"r": 2, "target_modules": ("lm_head",), "lora_dropout": 0.1}, ["lm_head"]),
        ({"r": 2, "target_modules": ("embed_tokens",), "use_dora": True}, ["use_dora: false"]),
        ({"r": 2, "rank_pattern": {"q_proj": 33}}, ["lora.rank_pattern: q_proj is 33", "at most 32"]),
        ({"r": 2, "rank_pattern": {"(?i)Q_proj": 8}}, ["lora.rank_pattern: '(?i)Q_proj'", "(?i:"]),
        ({"r": 2, "alpha_pattern": {"(?i)Q_proj": 8}}, ["lora.alpha_pattern: '(?i)Q_proj'", "(?i:"]),
        ({"r": 2, "alpha_pattern": {"q{99999999999999999999}": 8}}, ["not a regular expression", "such as q_proj"]),
        ({"r": 2, "rank_pattern": {"": 8}}, ["lora.rank_pattern has an empty string"]),
        ({"r": 2, "alpha_pattern": {" ": 8}}, ["lora.alpha_pattern has an empty string"]),
        ({"r": 2, "target_modules": ("q_proj", "")}, ["lora.target_modules has an empty string"]),
        ({"r": 2, "modules_to_save": ("",)}, ["lora.modules_to_save has an empty string"]),
        ({"r": 2, "modules_to_save": ("model.layers.1.mlp.up_proj",)}, ["model.layers.1.mlp.up_proj is both in"]),
    ],
)  # fmt: skip
def test_invalid_settings_raise(settings: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as found:
        add_adapters(base(UNTIED), LoraSettings(**settings))
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"r": value}, ["lora.r is", "an integer"]) for value in (0, -1, 2.0, True, "8", None, 1 << 31)),
        *(
            ({"lora_alpha": value}, ["lora.lora_alpha is", "above 0"])
            for value in (-1, 0, math.nan, math.inf, "8", None, True, 10**400)
        ),
        *(({"lora_dropout": value}, ["lora.lora_dropout is", "below 1"]) for value in (-0.1, 1, math.nan, "0")),
        *(({"dtype": value}, ["lora.dtype is", "fp32 or bf16"]) for value in ("fp16", "float32", None)),
        *(({"target_modules": value}, ["lora.target_modules is"]) for value in ("", (), None, (1,), {"q_proj"})),
        *(({"modules_to_save": value}, ["lora.modules_to_save is", "list or tuple"])
          for value in ("lm_head", None, ("lm_head", 1))),
        ({"use_dora": "false"}, ["lora.use_dora is 'false'", "true or false"]),
        ({"use_rslora": 1}, ["lora.use_rslora is 1"]),
        ({"rank_pattern": {"q_proj": 0}}, ["lora.rank_pattern: q_proj is 0", "an integer"]),
        ({"rank_pattern": ["q_proj"]}, ["lora.rank_pattern is ['q_proj']", "a mapping of module names"]),
        ({"alpha_pattern": {"q_proj": -2.0}}, ["lora.alpha_pattern: q_proj is -2.0", "above 0"]),
        ({"alpha_pattern": {"q_proj": math.inf}}, ["lora.alpha_pattern: q_proj is inf"]),
        ({"alpha_pattern": {1: 2.0}}, ["lora.alpha_pattern is {1: 2.0}"]),
        ({"lora_alpha": 0, "any_rank": True}, ["lora.lora_alpha is 0", "other than 0"]),
    ],
)  # fmt: skip
def test_values_invalid_in_a_recipe_are_invalid_in_python(settings: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as found:
        LoraSettings(**settings)
    for word in words:
        assert word in str(found.value)


def test_a_list_of_names_equals_a_tuple() -> None:
    one = LoraSettings(target_modules=["q_proj"], modules_to_save=["norm"])
    assert one == LoraSettings(target_modules=("q_proj",), modules_to_save=("norm",))
    assert LoraSettings.from_dict(one.to_dict()) == one
    assert LoraSettings(lora_alpha=-1.5, alpha_pattern={"q_proj": -2}, any_rank=True).lora_alpha == -1.5


def test_a_module_may_be_adapted_in_one_layer_and_fully_trained_in_another() -> None:
    one, other = (f"model.layers.{i}.self_attn.q_proj" for i in range(2))
    decoder = add_adapters(base(), LoraSettings(r=2, target_modules=(one,), modules_to_save=(other,)))
    assert {n.partition(".lora")[0] for n in trained_parameters(decoder)} == {one, f"{other}.weight"}


def test_dropout_on_only_an_embedding_allocates_nothing() -> None:
    settings = LoraSettings(r=2, target_modules=("embed_tokens",), lora_dropout=0.1)
    decoder = adapted(settings, UNTIED)
    assert create_dropout_masks(decoder, torch.device("cpu")) is None
    decoder.train().loss(IDS_BT, IDS_BT).backward()


@pytest.mark.parametrize("words", [["wq"], "wq.*"])
def test_an_unknown_target_lists_the_known_ones(words: str | list[str]) -> None:
    for shape, offered in ((TIED, False), (UNTIED, True)):
        with pytest.raises(RecipeError, match=r"choose from .*q_proj") as caught:
            adapt_spec.resolve_targets(shape, LoraSettings(r=2, target_modules=words))
        assert ("embed_tokens" in str(caught.value)) is offered


def test_a_tied_embedding_cannot_be_a_target() -> None:
    with pytest.raises(RecipeError, match="also the model's head"):
        add_adapters(base(TIED), LoraSettings(target_modules=("embed_tokens",)))


def test_invalid_names_and_orders_raise() -> None:
    decoder = base(UNTIED)
    for word in ("type", "keys", "pop", "forward"):
        with pytest.raises(RecipeError, match="reserved by torch"):
            add_adapters(decoder, LoraSettings(r=2), adapter=word)
    add_adapters(decoder, LoraSettings(r=2), adapter="fr")
    for wrong in (
        lambda: init_adapters(decoder, 0),
        lambda: remove_adapter(decoder, "default"),
    ):
        with pytest.raises(RecipeError, match="no adapter default; it has fr"):
            wrong()
    with pytest.raises(RecipeError, match="already quantized or has an adapter"):
        quantize_layout(decoder, "nf4")
    quantized = quantize_layout(base(UNTIED), "int8")
    with pytest.raises(RecipeError, match="already quantized or has an adapter"):
        quantize_layout(quantized, "nf4")


def test_dropout_without_masks_raises() -> None:
    decoder = adapted(LoraSettings(r=2, lora_dropout=0.5)).train()
    with pytest.raises(RecipeError, match="create_dropout_masks"):
        decoder.loss(IDS_BT[:, :-1], IDS_BT[:, 1:])
