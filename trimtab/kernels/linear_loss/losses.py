"""Losses built on `linear_loss`: distillation from a teacher, and the clipped policy loss of GRPO and PPO.

For training loops that users write themselves; no recipe uses them.
"""

# N tokens, n tokens of a chunk, C and D hidden sizes of student and teacher, V vocabulary

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.linear_loss import linear_loss

DIRECTIONS = ("forward", "reverse")


def distillation_loss(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    *,
    teacher_hidden_ND: torch.Tensor | None = None,
    teacher_weight_VD: torch.Tensor | None = None,
    teacher_logits_NV: torch.Tensor | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    token_weights_N: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Σ_n T² · KL between teacher and student, with both softmaxes at temperature T.

    forward: KL(teacher ‖ student) = Σ_v p · (log p − log q)        mode-covering
    reverse: KL(student ‖ teacher) = Σ_v q · (log q − log p)        mode-seeking

    The factor T² makes the gradients' magnitude independent of T.

    Args:
        teacher_hidden_ND, teacher_weight_VD: The teacher's last hidden states and head: its logits are computed for one
            chunk at a time too. Constants: the teacher gets no gradient.
        teacher_logits_NV: The teacher's logits, instead of both.
        token_weights_N: Weights per token; 0 excludes a token.
        options: `bias_V`, `impl`, `reduction`, `chunk_tokens` of `linear_loss`.

    Example:
        >>> hidden, head = torch.zeros(2, 4), torch.zeros(8, 4)
        >>> distillation_loss(hidden, head, teacher_logits_NV=torch.zeros(2, 8))
        tensor(0.)
    """
    assert direction in DIRECTIONS, f"direction must be one of {DIRECTIONS}, not {direction!r}"
    from_states = teacher_hidden_ND is not None and teacher_weight_VD is not None
    assert from_states != (teacher_logits_NV is not None), (
        "pass the teacher's hidden states and weight, or its logits"
    )
    teacher_ND = teacher_hidden_ND if from_states else teacher_logits_NV
    assert teacher_ND is not None

    def divergence(
        student_nV: torch.Tensor, teacher_n: torch.Tensor, *weights_n: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            logits_nV = teacher_n if teacher_weight_VD is None else teacher_n @ teacher_weight_VD.t()
            logp_nV = torch.log_softmax(logits_nV.to(student_nV.dtype) / temperature, -1)
        logq_nV = torch.log_softmax(student_nV / temperature, -1)
        ahead_nV, behind_nV = (logp_nV, logq_nV) if direction == "forward" else (logq_nV, logp_nV)
        loss_n = temperature**2 * (ahead_nV.exp() * (ahead_nV - behind_nV)).sum(-1)
        return loss_n * weights_n[0] if weights_n else loss_n

    more = () if token_weights_N is None else (token_weights_N,)
    return linear_loss(hidden_NC, weight_VC, divergence, teacher_ND.detach(), *more, **options)


def policy_loss(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    actions_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    old_logp_N: torch.Tensor | None = None,
    reference_logp_N: torch.Tensor | None = None,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl_coefficient: float = 0.0,
    temperature: float = 1.0,
    token_weights_N: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Σ_n of the clipped policy-gradient loss (GRPO, PPO), with an optional KL penalty relative to a reference model.

    r_n = exp(log π(action) − log π_old(action))
    loss_n = −min(r_n · A_n, clamp(r_n, 1 − clip, 1 + clip_high) · A_n) + β · (e^δ − δ − 1),  δ = log π_ref − log π

    Args:
        actions_N: The sampled token ids.
        advantages_N: A_n: in GRPO the group-normalized reward of the token's sequence.
        old_logp_N: Log-probabilities under the policy that sampled; by default the current policy's (r = 1, on-policy).
        reference_logp_N: Log-probabilities under the reference model; required where `kl_coefficient` (β) is not 0.
        clip, clip_high: Clipping range of r below and above 1; `clip_high` is `clip` by default.
        temperature: The sampling temperature.
        token_weights_N: Weights per token: 0 for prompts, 1 / length for a mean per sequence.
        options: `bias_V`, `impl`, `reduction`, `chunk_tokens` of `linear_loss`.

    Example:
        >>> hidden, head = torch.zeros(2, 4), torch.zeros(8, 4)
        >>> policy_loss(hidden, head, torch.tensor([1, 5]), torch.tensor([1.0, -3.0]))  # −1 + 3
        tensor(2.)
    """
    assert kl_coefficient == 0 or reference_logp_N is not None, "kl_coefficient requires reference_logp_N"
    high = clip if clip_high is None else clip_high
    by_token = {
        "old": old_logp_N,
        "reference": reference_logp_N if kl_coefficient else None,
        "weights": token_weights_N,
    }
    names = [name for name, x in by_token.items() if x is not None]

    def clipped(
        logits_nV: torch.Tensor, actions_n: torch.Tensor, advantages_n: torch.Tensor, *more_n: torch.Tensor
    ) -> torch.Tensor:
        given = dict(zip(names, more_n, strict=True))
        logp_n = torch.log_softmax(logits_nV / temperature, -1).gather(1, actions_n[:, None])[:, 0]
        ratio_n = torch.exp(logp_n - given.get("old", logp_n.detach()))
        limited_n = ratio_n.clamp(1 - clip, 1 + high)
        loss_n = -torch.minimum(ratio_n * advantages_n, limited_n * advantages_n)
        if "reference" in given:
            delta_n = given["reference"] - logp_n
            loss_n = loss_n + kl_coefficient * (torch.exp(delta_n) - delta_n - 1)
        return loss_n * given["weights"] if "weights" in given else loss_n

    tensors = (actions_N, advantages_N.detach(), *(x.detach() for x in by_token.values() if x is not None))
    return linear_loss(hidden_NC, weight_VC, clipped, *tensors, **options)
