"""Builds a decoder from a shape, and initializes random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import ModelError
from trimtab.facts.randomness import derive
from trimtab.facts.shapes import ModelShape, check_shape
from trimtab.model.decoder import Decoder
from trimtab.model.parts import LayerKernels
from trimtab.model.weights import WeightDestinations


def torch_dtype(name: str) -> torch.dtype:
    """Returns torch's dtype of a name ("bf16")."""
    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def build(
    shape: ModelShape,
    *,
    dtype: str,
    device: str | torch.device,
    attention: str = "reference",
    pointwise: str = "reference",
    kernels: Sequence[LayerKernels] | None = None,
    loss_impl: str = "chunked",
    loss_memory: int | None = None,
) -> Decoder:
    """Builds a decoder with uninitialized parameters; follow with `load_weights` or `init_weights`.

    Args:
        shape: the model.
        dtype: "fp32", "bf16", "fp16" (or "fp64", for checks) of every parameter.
        device: "meta" for a model without allocated parameters, to be materialized later.
        attention: the attention backend of all layers.
        pointwise: the implementation of norms, RoPE and gated activations in all layers: "reference" or "triton".
        kernels: the implementations per layer, instead of the same in all.
        loss_impl: the implementation of the loss.
        loss_memory: memory budget in bytes of the loss "triton", in addition to inputs and gradients.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> decoder = init_weights(build(tiny, dtype="fp32", device="cpu", attention="reference"), seed=0)
        >>> decoder.head_weight.shape
        torch.Size([64, 16])
    """
    check_shape(shape)
    _check_supported(shape)
    # Modules initialize their parameters on construction; on the meta device that costs neither time nor memory.
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            kernels=kernels or [LayerKernels(attention, attention, pointwise)] * shape.num_layers,
            loss_impl=loss_impl,
            loss_memory=loss_memory,
        )
    decoder = decoder.to(torch_dtype(dtype))
    names = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    assert names == list(shape.parameters()), "the decoder and its shape disagree on the parameters"
    return decoder if torch.device(device).type == "meta" else decoder.to_empty(device=device)


def _check_supported(shape: ModelShape) -> None:
    """Raises ModelError for a model that can be planned but not built."""
    found = [feature for block, _ in shape.layer_groups() for feature in _unsupported(block)]
    if shape.final_norm.unit_offset:
        found.append("norms with an offset")
    if found:
        raise ModelError(
            f"a model with {found[0]} can be planned but not trained", "use a model without this feature"
        )


def _unsupported(block: BlockShape) -> Iterator[str]:
    attention, feed_forward, norm = block.mixer, block.feed_forward, block.norm
    if not isinstance(feed_forward, FeedForwardShape):
        yield "experts"
    elif feed_forward.activation != "silu":
        yield f"the activation {feed_forward.activation}"
    if not isinstance(attention, AttentionShape):
        yield "latent attention"
        return
    rope = attention.rope
    features = {
        "norms after a sublayer": block.norm_placement != "pre",
        "norms with an offset": norm.unit_offset,
        "soft-capped attention": attention.softcap is not None,
        "a custom attention scale": attention.scale is not None,
        "attention sinks": attention.sinks,
        "norms over all heads": attention.qk_norm == "full",
        "layers without RoPE": rope is None,
        "partial RoPE": rope is not None and rope.rotary_dim is not None,
        "interleaved RoPE": rope is not None and rope.interleaved,
        "LongRoPE": rope is not None and rope.scaling is not None and rope.scaling.kind == "longrope",
    }
    yield from (feature for feature, there in features.items() if there)


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> Decoder:
    """Initializes random weights as Hugging Face does: normal matrices, norms of one, zero biases.

    Each tensor depends only on (seed, its name) and is drawn on the CPU in fp32, so device, dtype and
    sharding do not change the model.
    """
    std, destinations = decoder.shape.initializer_range, WeightDestinations(decoder)
    for name, dims in decoder.shape.parameters():
        if name.endswith("norm.weight"):
            drawn = torch.ones(dims)
        elif name.endswith(".bias"):
            drawn = torch.zeros(dims)
        else:
            generator = torch.Generator().manual_seed(derive(seed, "init", name))
            drawn = torch.empty(dims, dtype=torch.float32).normal_(0.0, std, generator=generator)
        destinations.copy(name, drawn, "random weights")
    return decoder
