"""What layers keep, in the host's memory between the forward and the backward pass: inputs, dear results.

A tensor is copied to pinned memory by a stream of its own while the layer computes, and comes back while the layer
above is in its backward pass. Those of at most two layers are on the device at once: of the one that makes or uses them
and of the one whose are on their way. Nothing waits for the host.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.facts.errors import ResourceError
from trimtab.facts.units import format_bytes


class HostStore:
    """Keeps tensors in pinned host memory; `with store.keeping(x):` around the call that saves x.

    Buffers are used again from step to step. One store serves one decoder: what was put in last comes out first.

    Example:
        >>> store = HostStore("cuda")                          # doctest: +SKIP
        >>> with store.keeping(x):                             # doctest: +SKIP
        ...     y = checkpoint(layer, x, use_reentrant=False)  # doctest: +SKIP
    """

    def __init__(self, device: torch.device | str) -> None:
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: list[tuple[_Pinned, torch.cuda.Event | None]] = []
        self._layer: weakref.ref[_Layer] | None = None
        self.host_bytes = 0
        """Pinned so far."""

    @contextmanager
    def keeping(self, x: torch.Tensor) -> Iterator[None]:
        """Whatever is saved in here and is x goes to the host; everything else stays where it is."""
        place = (x.data_ptr(), x.dtype, x.shape, x.stride())
        kept: list[_Kept] = []  # x may be saved more than once; it travels once

        def pack(tensor: torch.Tensor) -> Any:
            if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) != place:
                return tensor
            if not kept:
                kept.extend(self._put([tensor], self._next_layer()))
            return kept[0]

        def unpack(packed: Any) -> torch.Tensor:
            return packed.get() if isinstance(packed, _Kept) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def settle(self) -> None:
        """The device has done everything it was given: no copy is waited for any more."""
        self._free = [(buffer, None) for buffer, _ in self._free]

    def join(self) -> None:
        """The current stream waits for the copies to the host; those that come back are waited for by who uses them."""
        torch.cuda.current_stream(self._out.device).wait_stream(self._out)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[_Kept]:
        """Sends more tensors of the layer whose input was kept last; `.get()` brings one back."""
        layer = self._layer() if self._layer is not None else None
        return self._put(tensors, layer or self._next_layer())

    def _next_layer(self) -> _Layer:
        below = self._layer() if self._layer is not None else None
        if below is not None:
            below.leave()  # any earlier, the device would wait for copies that have only just begun
        layer = _Layer(below)
        self._layer = weakref.ref(layer)
        return layer

    def _put(self, tensors: Sequence[torch.Tensor], layer: _Layer) -> list[_Kept]:
        sent = [_Kept(self, x.detach(), layer) for x in tensors]
        layer.members += [weakref.ref(kept) for kept in sent]
        return sent

    def _take(self, num_bytes: int) -> _Pinned:
        """A pinned buffer of at least so many bytes that no copy is using, or soon none will."""
        for i, (buffer, used) in enumerate(self._free):
            if buffer.num_bytes >= num_bytes:
                del self._free[i]
                if used is not None:
                    self._out.wait_event(used)
                return buffer
        self._unpin_free()
        self.host_bytes += num_bytes
        return _Pinned(num_bytes)

    def _unpin_free(self) -> None:
        """Unpins the free buffers, all of which are too small for what comes now.

        Longer sequences need larger buffers. Runs with `group_by_length` begin with their longest microbatch, but a
        resume within an epoch does not: without this, buffers of every size that it met would stay pinned.
        """
        for buffer, used in self._free:
            if used is not None:
                used.synchronize()
            self.host_bytes -= buffer.num_bytes
        self._free.clear()

    def _give(self, buffer: _Pinned, last_use: list[torch.cuda.Event]) -> None:
        self._free.append((buffer, last_use[-1] if last_use else None))
        self._free.sort(key=lambda entry: entry[0].num_bytes)


class _Pinned:
    """Host memory that a GPU copies to and from by itself, of just this size: torch's own pinned allocator takes the
    next power of two, up to twice what a plan counts. On pages of its own: of a page that two buffers share, CUDA pins
    only the first one's part and refuses the other's."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tensor = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        self.tensor.zero_()  # by all threads; CUDA would bring in one page after another
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if failed:
            raise ResourceError(
                f"the host did not pin {format_bytes(num_bytes)} for recompute: offload (CUDA error {failed})",
                "set recompute: block, or raise the limit of locked memory (ulimit -l)",
            )
        # The tensor is held until then, so that the address is still its own.
        weakref.finalize(self, _unpin, self.tensor).atexit = False


def _unpin(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class _Layer:
    """What one layer sent, and the layer that sent before it. Each tensor holds its layer, and no layer its tensors."""

    def __init__(self, below: _Layer | None) -> None:
        self.below = below
        self.members: list[weakref.ref[_Kept]] = []

    def begin(self) -> None:
        """This layer's backward pass begins: all of the next one's start their way back."""
        below, self.below = self.below, None
        for kept in [] if below is None else below.there():
            kept.fetch()

    def leave(self) -> None:
        """The device may forget all of this layer's."""
        for kept in self.there():
            kept.leave()

    def there(self) -> list[_Kept]:
        """Those that autograd still holds."""
        found = (member() for member in self.members)
        return [kept for kept in found if kept is not None]


class _Kept:
    """One tensor on its way to the host, there, or on its way back."""

    def __init__(self, store: HostStore, x: torch.Tensor, layer: _Layer) -> None:
        self._store, self._layer = store, layer
        self._device: torch.Tensor | None = x
        """Here until the next layer begins, which is when the device may forget it, and again when fetched."""
        self._buffer = store._take(x.numel() * x.element_size())
        flat = self._buffer.tensor[: x.numel() * x.element_size()].view(x.dtype)
        # Laid out as it is on the device, the heads between the tokens say, so that one plain copy will do.
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(x)
        self._host = flat.as_strided(x.shape, x.stride()) if dense else flat.view(x.shape)
        self._arrived = torch.cuda.Event()
        self._uses: list[torch.cuda.Event] = []
        stream = store._out
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
            self._arrived.record(stream)
        self._place = x.device
        # The buffer is free when autograd has dropped this; copies still under way are waited for by the next user.
        weakref.finalize(self, store._give, self._buffer, self._uses).atexit = False

    def leave(self) -> None:
        """Frees the device's copy, once the host's is complete."""
        if self._device is not None:
            torch.cuda.current_stream(self._place).wait_event(self._arrived)
            self._device = None

    def fetch(self) -> None:
        """Starts the way back."""
        if self._device is not None:
            return
        current, back = torch.cuda.current_stream(self._place), self._store._back
        # Allocated on the stream that will use it; its memory may still be in use by work queued there.
        self._device = torch.empty_like(self._host, device=self._place)
        back.wait_stream(current)
        with torch.cuda.stream(back):
            self._device.copy_(self._host, non_blocking=True)
            returned = torch.cuda.Event()
            returned.record(back)
        self._uses.append(returned)

    def get(self) -> torch.Tensor:
        """The tensor on the device; those of the layer below start their way back."""
        self.fetch()
        if self._uses:
            torch.cuda.current_stream(self._place).wait_event(self._uses[-1])
        self._layer.begin()
        x = self._device
        assert x is not None
        self._device = None  # autograd holds it from here on, as long as it needs it
        return x
