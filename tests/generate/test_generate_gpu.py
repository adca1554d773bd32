"""Left-padded batches through the attention backends of a GPU, with a KV cache."""

from __future__ import annotations

import pytest
import torch

from trimtab.facts.shapes import uniform_shape
from trimtab.generate.cache import KVCache
from trimtab.generate.loop import _last_logits
from trimtab.model import build, init_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("varlen", "bf16"), ("sdpa_efficient", "fp32"), ("sdpa_efficient", "bf16"), ("triton", "bf16")],
)
@pytest.mark.parametrize("window", [None, 6])
def test_padded_rows_match_single_rows(attention: str, dtype: str, window: int | None) -> None:
    shape = uniform_shape(
        "mistral", 260, 128, 256, 2, 4, 2, 32, max_positions=128, sliding_window=window, initializer_range=0.1
    )
    exact = init_weights(build(shape, dtype="fp32", device="cpu", attention="reference"), 0)
    decoder = build(shape, dtype=dtype, device="cpu", attention=attention)
    decoder.load_state_dict(exact.state_dict())
    exact, decoder = exact.double(), decoder.cuda()
    prompts = [[7 + 3 * i % 250 for i in range(n)] for n in (1, 40, 17)]
    later = [[9, 8, 7], [6, 5, 4], [3, 2, 1]]
    padding = [40 - len(ids) for ids in prompts]
    cache = KVCache(2, windows=[window] * 2, block=4)
    parameters = shape.num_parameters
    with torch.no_grad():
        steps = [[[0] * p + ids for p, ids in zip(padding, prompts, strict=True)]]
        steps += [[[row[step]] for row in later] for step in range(3)]
        found = [_last_logits(decoder, ids_BT, padding, cache, parameters) for ids_BT in steps]
        for b, ids in enumerate(prompts):
            for step in range(4):
                truth = exact.logits(exact(torch.tensor([[*ids, *later[b][:step]]])))[0, -1]
                error = (found[step][b].cpu().double() - truth).abs().max() / truth.abs().max()
                assert error < (1e-5 if dtype == "fp32" else 0.03), (b, step, float(error))
