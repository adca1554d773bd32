"""What an adapted decoder holds from step to step besides its tensors, for whoever records its steps."""

from __future__ import annotations

from trimtab.adapt import workspace
from trimtab.model.decoder import Decoder


class Held:
    """The shared workspace, and the copies of layers' inputs that go to the host and come back.

    Example:
        >>> Held(decoder).forget()  # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def forget(self) -> None:
        """Gives the workspace's memory back; the next product asks for it anew."""
        workspace.release()

    def settle(self) -> None:
        """The device is idle: no copy is waited for any more."""
        store = getattr(self.decoder.around, "store", None)
        if store is not None:
            store.settle()

    def join(self) -> None:
        """The current stream waits for copies that are under way."""
        store = getattr(self.decoder.around, "store", None)
        if store is not None:
            store.join()
