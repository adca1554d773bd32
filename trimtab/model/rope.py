"""Rotary position embeddings with the scalings of published models, in fp32 or wider.

The rotation itself is `trimtab.kernels.rope`. Legend: B batch, T tokens, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from trimtab.facts.blocks import Rope, RopeScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns (inv_freq_F in fp32 on the CPU, factor on cos and sin), as transformers computes them.

    "dynamic" also depends on the length of each document: see `Rotary.cos_sin`.
    """
    scaling, theta, D = rope.scaling, rope.theta, head_dim
    # On the CPU even if the model is built on the meta device.
    pos_freqs_F = theta ** (torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D)
    inv_freq_F = 1.0 / pos_freqs_F
    if scaling is None or scaling.kind == "dynamic":
        return inv_freq_F, 1.0
    if scaling.kind == "linear":
        return inv_freq_F / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inv_freq_F, scaling), 1.0
    assert scaling.kind == "yarn", scaling.kind
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return _yarn(pos_freqs_F, scaling, theta, D), factor


def _llama3(inv_freq_F: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divides low frequencies by the factor and keeps high ones, with a smooth transition (Llama 3.1)."""
    assert scaling.original_max_positions is not None
    original, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_F = 2 * math.pi / inv_freq_F
    scaled_F = torch.where(wavelength_F > original / low, inv_freq_F / scaling.factor, inv_freq_F)
    smooth_F = (original / wavelength_F - low) / (high - low)
    between_F = (1 - smooth_F) * scaled_F / scaling.factor + smooth_F * scaled_F
    is_between_F = (wavelength_F >= original / high) & (wavelength_F <= original / low)
    return torch.where(is_between_F, between_F, scaled_F)


def _yarn(pos_freqs_F: torch.Tensor, scaling: RopeScaling, theta: float, D: int) -> torch.Tensor:
    """Interpolates low frequencies and keeps high ones, with a linear ramp (https://arxiv.org/abs/2309.00071)."""
    assert scaling.original_max_positions is not None
    original = scaling.original_max_positions

    def index_of(rotations: float) -> float:
        """The index of the frequency with this number of rotations over the original length."""
        return D * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    if low == high:
        high += 0.001  # the ramp divides by their difference
    ramp_F = ((torch.arange(D // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    keep_F = 1 - ramp_F
    return 1.0 / (scaling.factor * pos_freqs_F) * (1 - keep_F) + 1.0 / pos_freqs_F * keep_F


class Rotary:
    """Computes cosines and sines of a batch's positions, once per forward pass for all layers.

    Neither a module nor a buffer: frequencies stay exact when a model is built on the meta device, moved or cast. They
    are cached per device, so that no step waits for a copy.
    """

    def __init__(self, rope: Rope, head_dim: int, max_positions: int) -> None:
        self.rope, self.head_dim, self.max_positions = rope, head_dim, max_positions
        self.inv_freq_F, self.factor = inverse_frequencies(rope, head_dim)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def cos_sin(
        self,
        positions_BT: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        documents_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_BTF, sin_BTF) for positions_BT, in fp32 or wider.

        Args:
            positions_BT: Each token's position in its document.
            dtype: Dtype of the hidden states; fp64 gives fp64 angles.
            documents_BT: An id per token that differs between adjacent packed documents (`Layout.documents_BT`), on any
                device; None if positions alone determine the documents.
                Only "dynamic" scaling reads it.

        "dynamic" (NTK-aware) scaling derives the base from the length of the token's own document, so that a document
        has the same angles whether it is packed or not. For a single sequence this equals transformers, which uses the
        longest row of a batch, and keeps the base of the longest sequence so far until one is shorter than
        `max_position_embeddings`. With a key/value cache both rotate new queries and keys by the current length, and
        cached keys keep their angles.
        """
        device = positions_BT.device
        if device not in self._on_device:
            self._on_device[device] = self.inv_freq_F.to(device)
        inv_freq_F = self._on_device[device]
        scaling = self.rope.scaling
        if scaling is not None and scaling.kind == "dynamic":
            inv_freq_F = self._dynamic(positions_BT, documents_BT, scaling.factor)
        wide = torch.promote_types(dtype, torch.float32)
        angles_BTF = positions_BT[..., None].to(wide) * inv_freq_F.to(wide)
        return angles_BTF.cos() * self.factor, angles_BTF.sin() * self.factor

    def _dynamic(
        self, positions_BT: torch.Tensor, documents_BT: torch.Tensor | None, factor: float
    ) -> torch.Tensor:
        """inv_freq_BTF: a larger base for documents beyond the pretrained length; computed in fp64 on the device."""
        D, limit = self.head_dim, self.max_positions
        length_BT = document_lengths(positions_BT, documents_BT).clamp(min=limit).double()
        base_BT = self.rope.theta * (factor * length_BT / limit - (factor - 1)) ** (D / (D - 2))
        exponent_F = torch.arange(0, D, 2, dtype=torch.float64, device=positions_BT.device) / D
        return (1.0 / base_BT[..., None] ** exponent_F).float()


def document_lengths(positions_BT: torch.Tensor, documents_BT: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the length of each token's document: the last position of its run of consecutive positions, plus one.

    Does not synchronize with a GPU. `documents_BT` separates documents whose positions happen to be consecutive.

    Example:
        >>> document_lengths(torch.tensor([[0, 1, 2, 0, 1, 0]])).tolist()
        [[3, 3, 3, 2, 2, 1]]
        >>> document_lengths(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 0, 0, -1]])).tolist()
        [[3, 3, 3, 4]]
    """
    T = positions_BT.shape[1]
    if T == 0:
        return positions_BT
    ends_BT = torch.ones_like(positions_BT, dtype=torch.bool)
    ends_BT[:, :-1] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    if documents_BT is not None and documents_BT.shape == positions_BT.shape:
        ends_BT[:, :-1] |= (documents_BT[:, 1:] != documents_BT[:, :-1]).to(positions_BT.device)
    place_T = torch.arange(T, device=positions_BT.device)
    last_BT = torch.where(ends_BT, place_T, T - 1).flip(1).cummin(1).values.flip(1)
    return positions_BT.gather(1, last_BT) + 1
