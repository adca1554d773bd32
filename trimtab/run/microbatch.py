"""The loss of a microbatch in two halves: what the host prepares, and what the device computes from it."""

# B rows, T tokens

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.data import Batch
from trimtab.kernels.attention.layout import Bounds, Layout, PreparedLayout
from trimtab.model import Decoder
from trimtab.trainer.microstep import LossSum


class MicrobatchLoss:
    """A microbatch to the sum of its token losses, a 0-dim fp32 tensor on the device, and their number.

    Example:
        >>> loss = MicrobatchLoss(decoder, torch.device("cuda"), nullcontext, packing=True)  # doctest: +SKIP
        >>> loss(batch).total.backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        autocast: Callable[[], Any],
        *,
        packing: bool,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.decoder, self.device, self.autocast, self.packing = decoder, device, autocast, packing
        # What training adds to the cross-entropy; evaluation calls the decoder's loss without them.
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def __call__(self, batch: Batch) -> LossSum:
        """The loss, whatever reads the layout."""
        # Before the move: a packed layout's offsets are found without the GPU. A document alone in its window
        # needs none: the padding comes after it, where no token of its looks.
        layout = Layout.packed(batch.documents_BT) if self.packing else Layout.causal()
        moved = batch.to(self.device)
        total = self._loss(moved.input_ids_BT, moved.labels_BT, moved.positions_BT, layout)
        return LossSum(total, batch.num_targets)

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """On the host, all [B, T], whatever documents there are. Not for "varlen" and "flex", whose forms of a layout
        change their size with the documents."""
        found = {"ids": batch.input_ids_BT, "labels": batch.labels_BT, "positions": batch.positions_BT}
        if not self.packing:
            return found
        layout = Layout.packed(batch.documents_BT)
        if {kernels.attention for kernels in self.decoder.kernels} == {"triton"}:
            bounds = layout.prepare("triton", "cpu", batch.documents_BT.shape[1])
            return found | {"first": bounds.first_BT, "last": bounds.last_BS}
        assert layout.documents_BT is not None
        return found | {"documents": layout.documents_BT}

    def of(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of such tensors on the device; nothing waits for it."""
        layout = Layout(inputs.get("documents"))  # from which masks are made on the device
        if "first" in inputs:
            layout = PreparedLayout(Bounds(inputs["first"], inputs["last"]), inputs["first"])
        return self._loss(inputs["ids"], inputs["labels"], inputs["positions"], layout)

    def _loss(
        self, ids_BT: torch.Tensor, labels_BT: torch.Tensor, positions_BT: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        with self.autocast():
            return self.decoder.loss(
                ids_BT,
                labels_BT,
                positions_BT,
                layout,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
            )
