"""Sampling of the next token from logits. Legend: B rows, V vocabulary, N candidates of a row, best first.

Each token uses one uniform random number u in [0, 1), a pure function of (seed, prompt, step), and inverts the
cumulative distribution at u. So a text does not depend on the other prompts of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.facts.randomness import derive
from trimtab.generate.options import SamplingOptions

MIN_TEMPERATURE = 1e-30
"""Dividing logits by less would overflow; below it decoding is greedy."""


def uniform(seed: int, prompt: int, step: int) -> float:
    """The uniform random number in [0, 1) for one token."""
    return derive(seed, "sample", prompt, step) / 2**63


def sample_tokens(
    logits_BV: torch.Tensor, options: SamplingOptions, draws_B: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Sample the next token of each row, int64 [B], from fp32 logits; `draws_B` has (prompt, step) of each row.

    Example:
        >>> sample_tokens(torch.tensor([[0.0, 3.0, 1.0]]), SamplingOptions(), [(0, 0)]).tolist()
        [1]
    """
    temperature, top_k, top_p = options.sampling_temperature, options.top_k, options.top_p
    if temperature < MIN_TEMPERATURE:
        return logits_BV.argmax(dim=-1)
    scaled_BV = logits_BV / temperature
    ids_BN: torch.Tensor | None = None
    if 0 < top_k < scaled_BV.shape[-1]:
        scaled_BV, ids_BN = scaled_BV.topk(top_k, dim=-1)
    elif top_p < 1:
        scaled_BV, ids_BN = scaled_BV.sort(dim=-1, descending=True, stable=True)
    # fp64: a cumulative sum over 150,000 probabilities loses the rare ones in fp32.
    cumulative_BN = scaled_BV.double().softmax(dim=-1).cumsum(dim=-1)
    total_B1 = cumulative_BN[:, -1:]
    if top_p < 1:
        # A token is kept if those before it have not yet reached top_p, so at least one always is.
        kept_B1 = (cumulative_BN < top_p * total_B1).sum(dim=-1, keepdim=True)
        total_B1 = cumulative_BN.gather(-1, kept_B1.clamp(max=cumulative_BN.shape[-1] - 1))
    uniforms_B = [uniform(options.seed, prompt, step) for prompt, step in draws_B]
    u_B1 = torch.tensor(uniforms_B, dtype=torch.float64, device=logits_BV.device)[:, None]
    at_B1 = torch.searchsorted(cumulative_BN, u_B1 * total_B1, right=True)
    at_B1 = at_B1.clamp(max=cumulative_BN.shape[-1] - 1)
    return (at_B1 if ids_BN is None else ids_BN.gather(-1, at_B1))[:, 0]
