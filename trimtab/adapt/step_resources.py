"""Releases an adapted decoder's workspace and waits for its asynchronous copies, as CUDA graph capture requires."""

from __future__ import annotations

from trimtab.adapt import workspace
from trimtab.model.decoder import Decoder


class StepResources:
    """The shared workspace of dequantized weights, and the host copies of offloaded activations.

    Example:
        >>> StepResources(decoder).release_workspace()  # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def release_workspace(self) -> None:
        """Frees the workspace; the next product allocates it again."""
        workspace.release()

    def clear_copy_events(self) -> None:
        """Drops the events of finished host copies; call it when the device is idle."""
        store = getattr(self.decoder.layer_context, "store", None)
        if store is not None:
            store.clear_events()

    def wait_for_copies(self) -> None:
        """Makes the current stream wait for host copies in flight."""
        store = getattr(self.decoder.layer_context, "store", None)
        if store is not None:
            store.wait_for_copies()
