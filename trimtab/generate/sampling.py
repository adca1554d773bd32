"""From logits to the next token. Legend: B rows, V vocabulary, N candidates of a row, best first.

Chance is one number u in [0, 1) a token, a pure function of (seed, prompt, step): the token is the one at u
on the cumulative distribution. So a text does not depend on the prompts that ran beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.facts.errors import RecipeError
from trimtab.facts.randomness import derive


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Example:
        >>> Sampling(temperature=0).pick(torch.tensor([[0.0, 3.0, 1.0]]), [(0, 0)]).tolist()
        [1]
    """

    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"temperature is {self.temperature}", "give 0 (always the likeliest) or more")
        if self.top_k < 0:
            raise RecipeError(f"top_k is {self.top_k}", "give the number of candidates, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p is {self.top_p}", "give a share above 0, at most 1")

    @staticmethod
    def resolve(temperature: float | None, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Sampling:
        """Options as users give them: without a temperature it is 1 if top_p or top_k is given, otherwise 0.

        Temperature 0 always takes the likeliest token, which top_p and top_k cannot change: together they are a
        `RecipeError`.

        Example:
            >>> Sampling.resolve(None).temperature, Sampling.resolve(None, top_p=0.9).temperature
            (0.0, 1.0)
        """
        limited = [name for name, given in (("top_p", top_p != 1.0), ("top_k", top_k != 0)) if given]
        if temperature is None:
            temperature = 1.0 if limited else 0.0
        elif temperature == 0 and limited:
            raise RecipeError(
                f"{limited[0]} has no effect at temperature 0, which always takes the likeliest token",
                f"set a temperature above 0, such as 0.7, or leave {' and '.join(limited)} out",
            )
        return Sampling(temperature, top_k, top_p, seed)

    def uniform(self, prompt: int, step: int) -> float:
        """The number in [0, 1) that decides one token."""
        return derive(self.seed, "sample", prompt, step) / 2**63

    def pick(self, logits_BV: torch.Tensor, places_B: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The next token of each row, int64 [B], from fp32 logits; `places_B` are (prompt, step) a row."""
        if self.temperature == 0:
            return logits_BV.argmax(dim=-1)
        scaled_BV = logits_BV / self.temperature
        ids_BN: torch.Tensor | None = None
        if 0 < self.top_k < scaled_BV.shape[-1]:
            scaled_BV, ids_BN = scaled_BV.topk(self.top_k, dim=-1)
        elif self.top_p < 1:
            scaled_BV, ids_BN = scaled_BV.sort(dim=-1, descending=True, stable=True)
        # fp64: a running sum over 150,000 probabilities loses the rare ones in fp32.
        cumulative_BN = scaled_BV.double().softmax(dim=-1).cumsum(dim=-1)
        total_B1 = cumulative_BN[:, -1:]
        if self.top_p < 1:
            # A token is kept if those before it have not yet reached top_p, so at least one always is.
            kept_B1 = (cumulative_BN < self.top_p * total_B1).sum(dim=-1, keepdim=True)
            total_B1 = cumulative_BN.gather(-1, kept_B1.clamp(max=cumulative_BN.shape[-1] - 1))
        uniforms_B = [self.uniform(prompt, step) for prompt, step in places_B]
        u_B1 = torch.tensor(uniforms_B, dtype=torch.float64, device=logits_BV.device)[:, None]
        at_B1 = torch.searchsorted(cumulative_BN, u_B1 * total_B1, right=True)
        at_B1 = at_B1.clamp(max=cumulative_BN.shape[-1] - 1)
        return (at_B1 if ids_BN is None else ids_BN.gather(-1, at_B1))[:, 0]
