"""Validation of the loss's inputs."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

import torch

from trimtab.kernels.linear_cross_entropy.labels import check_labels


def check_inputs(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    token_weights_N: torch.Tensor | None,
    ignore_index: int,
) -> None:
    """Asserts shapes and dtypes; raises `DataError` for labels outside the vocabulary."""
    assert hidden_NC.ndim == 2, f"hidden must be [tokens, size], not {tuple(hidden_NC.shape)}"
    assert weight_VC.ndim == 2, f"weight must be [vocabulary, size], not {tuple(weight_VC.shape)}"
    assert hidden_NC.shape[1] == weight_VC.shape[1], f"{hidden_NC.shape} against {weight_VC.shape}"
    assert hidden_NC.dtype == weight_VC.dtype, f"hidden is {hidden_NC.dtype}, weight {weight_VC.dtype}"
    if bias_V is not None:
        assert bias_V.shape == weight_VC.shape[:1], f"{tuple(bias_V.shape)} against {weight_VC.shape}"
        assert bias_V.dtype == weight_VC.dtype, f"bias is {bias_V.dtype}, weight {weight_VC.dtype}"
    tokens = hidden_NC.shape[:1]
    assert labels_N.shape == tokens, f"{hidden_NC.shape[0]} tokens, {tuple(labels_N.shape)} labels"
    if token_weights_N is not None:
        assert token_weights_N.shape == tokens, (
            f"{tuple(tokens)} tokens, {tuple(token_weights_N.shape)} weights"
        )
        assert not token_weights_N.requires_grad, (
            "weights are not differentiable; multiply losses of reduction='none'"
        )
    check_labels(labels_N, weight_VC.shape[0], ignore_index)


def cast_for_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts the tensor to autocast's dtype if autocast is enabled, as for any other matrix product."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def gradient_dtype(weight_VC: torch.Tensor) -> torch.dtype:
    """The dtype of weight's gradient: a 16-bit parameter may request fp32 (`Tensor.grad_dtype`)."""
    if torch.compiler.is_compiling() or not weight_VC.is_leaf:
        return weight_VC.dtype
    return weight_VC.grad_dtype or weight_VC.dtype


def token_scales(
    kept_N: torch.Tensor, token_weights_N: torch.Tensor | None, count: torch.Tensor | None
) -> torch.Tensor:
    """fp32 weights of the tokens' losses: 0 where ignored, divided by `count` where given."""
    scale_N = kept_N.to(torch.float32)
    if token_weights_N is not None:
        scale_N = torch.where(kept_N, token_weights_N.to(torch.float32), 0.0)
    return scale_N if count is None else scale_N / count
