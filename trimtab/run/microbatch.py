"""The loss of a microbatch in two parts: input tensors prepared on the host, and the computation on the device."""

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
    """Maps a microbatch to the sum of its token losses (a 0-dim fp32 tensor on the device) and its number of targets.

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
        # Additional terms of the training loss; evaluation calls the decoder's loss without them.
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def __call__(self, batch: Batch) -> LossSum:
        """Returns the loss, with any attention backend."""
        # Before the copy to the GPU: a packed layout's offsets are computed on the host. A sequence of one document
        # needs none: padding follows the document, and causal attention ignores later positions.
        layout = Layout.packed(batch.documents_BT) if self.packing else Layout.causal()
        moved = batch.to(self.device)
        total = self._loss(moved.input_ids_BT, moved.labels_BT, moved.positions_BT, layout)
        return LossSum(total, batch.num_targets)

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the inputs of `compute` on the host, with shapes that do not depend on the documents.

        Not for the backends "varlen" and "flex", for which the sizes of a layout's tensors depend on the documents.
        """
        found = {"ids": batch.input_ids_BT, "labels": batch.labels_BT, "positions": batch.positions_BT}
        if not self.packing:
            return found
        layout = Layout.packed(batch.documents_BT)
        if {kernels.attention for kernels in self.decoder.kernels} == {"triton"}:
            bounds = layout.prepare("triton", "cpu", batch.documents_BT.shape[1])
            return found | {"first": bounds.first_BT, "last": bounds.last_BS}
        assert layout.documents_BT is not None
        return found | {"documents": layout.documents_BT}

    def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the loss from such inputs on the device, without synchronization."""
        layout = Layout(inputs.get("documents"))  # masks are computed from it on the device
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
