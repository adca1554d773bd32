"""fp32 → bf16 by stochastic rounding, with counter-based random bits.

A value x between its two bf16 neighbours a < b becomes b with probability (x − a)/(b − a), else a, so that
E[round(x)] = x and updates far smaller than half a bf16 step still change a weight on average. The bits come
from an integer hash of (seed, step, parameter index, element index): there is no generator state to save, and a shard
with the offset of its first element is rounded exactly as in the unsharded tensor.
"""

# N elements, in any shape; element i of the flattened tensor has index offset + i

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stochastic_round_(
    out_N: torch.Tensor,
    value_N: torch.Tensor,
    *,
    seed: int,
    step: int,
    param_index: int,
    stream: int = 0,
    offset: int = 0,
    impl: str = "reference",
) -> torch.Tensor:
    """Rounds fp32 `value_N` into bf16 `out_N` (same shape, contiguous) stochastically; returns `out_N`.

    Values that bf16 represents exactly, infinities and NaN are unchanged. A finite value stays finite: values beyond
    the largest bf16 become the largest bf16. `offset` is the index of the first element in the unsharded tensor;
    `stream` separates tensors that belong to one parameter (weight 0, first moment 1, second moment 2).

    Example:
        >>> import torch
        >>> w = torch.empty(4, dtype=torch.bfloat16)
        >>> stochastic_round_(w, torch.full((4,), 1.5), seed=0, step=1, param_index=0).tolist()
        [1.5, 1.5, 1.5, 1.5]
    """
    where = {"seed": seed, "step": step, "param_index": param_index, "stream": stream, "offset": offset}
    if impl == "reference":
        from trimtab.kernels.stochastic_rounding import impl_reference

        return impl_reference.stochastic_round_(out_N, value_N, **where)
    if impl == "triton":
        from trimtab.kernels.stochastic_rounding import impl_triton

        return impl_triton.stochastic_round_(out_N, value_N, **where)
    raise ValueError(f"stochastic_rounding has no impl {impl!r}: reference or triton")


def random_bits(
    count: int,
    *,
    seed: int,
    step: int,
    param_index: int,
    stream: int = 0,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """`count` hashed words as int32 [count] (all 32 bits are usable), for elements offset … offset + count − 1.

    Example:
        >>> a = random_bits(8, seed=0, step=1, param_index=2)
        >>> b = random_bits(4, seed=0, step=1, param_index=2, offset=4)
        >>> bool((a[4:] == b).all())
        True
    """
    from trimtab.kernels.stochastic_rounding import impl_reference

    return impl_reference.random_bits(
        count, seed=seed, step=step, param_index=param_index, stream=stream, offset=offset, device=device
    )


def random_bits_at(
    index_N: torch.Tensor, *, seed: int, step: int, param_index: int, stream: int = 0
) -> torch.Tensor:
    """`random_bits` of the elements with the given int64 indices, in any order: int32, same shape.

    Example:
        >>> import torch
        >>> a = random_bits(8, seed=0, step=1, param_index=2)
        >>> bool((random_bits_at(torch.tensor([5, 2]), seed=0, step=1, param_index=2) == a[[5, 2]]).all())
        True
    """
    from trimtab.kernels.stochastic_rounding import impl_reference

    return impl_reference.random_bits_at(
        index_N, seed=seed, step=step, param_index=param_index, stream=stream
    )


def round_with_(out_N: torch.Tensor, value_N: torch.Tensor, words_N: torch.Tensor) -> torch.Tensor:
    """`stochastic_round_` with given random words: the low half of each int32 decides.

    `words_N` (same shape) is overwritten.

    Example:
        >>> import torch
        >>> w = torch.empty(2, dtype=torch.bfloat16)
        >>> round_with_(w, torch.tensor([1.001, 1.001]), torch.tensor([0, 0xFFFF], dtype=torch.int32)).tolist()
        [1.0, 1.0078125]
    """
    from trimtab.kernels.stochastic_rounding import impl_reference

    return impl_reference.round_with_(out_N, value_N, words_N)
