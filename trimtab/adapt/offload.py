"""Activation offloading to pinned host memory between forward and backward: layer inputs and expensive results.

A tensor is copied to pinned memory on a separate stream while the layer computes, and copied back while the layer above
runs its backward pass. The device holds the tensors of at most two layers: the one that computes, and the one that is
being copied. There is no synchronization with the host.
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
    """Offloads tensors to pinned host memory: put `with store.offload_input(x):` around the call that saves x.

    Buffers are reused across steps. Each decoder has its own store, which prefetches layers in the reverse
    order of the forward pass.

    Example:
        >>> store = HostStore("cuda")                          # doctest: +SKIP
        >>> with store.offload_input(x):                             # doctest: +SKIP
        ...     y = checkpoint(layer, x, use_reentrant=False)  # doctest: +SKIP
    """

    def __init__(self, device: torch.device | str) -> None:
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: list[tuple[_Pinned, torch.cuda.Event | None]] = []
        self._layer: weakref.ref[_Layer] | None = None
        self.host_bytes = 0
        """Bytes of pinned host memory."""

    @contextmanager
    def offload_input(self, x: torch.Tensor) -> Iterator[None]:
        """Offloads x if it is saved for the backward pass inside the block; other saved tensors stay on the device."""
        identity = (x.data_ptr(), x.dtype, x.shape, x.stride())
        offloaded: list[_OffloadedTensor] = []  # x may be saved more than once; it is copied once

        def pack(tensor: torch.Tensor) -> Any:
            if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) != identity:
                return tensor
            if not offloaded:
                offloaded.extend(self._offload([tensor], self._next_layer()))
            return offloaded[0]

        def unpack(packed: Any) -> torch.Tensor:
            return packed.get() if isinstance(packed, _OffloadedTensor) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def clear_events(self) -> None:
        """Drops the events of finished copies; call it when the device is idle."""
        self._free = [(buffer, None) for buffer, _ in self._free]

    def wait_for_copies(self) -> None:
        """Makes the current stream wait for copies to the host; `get` waits for copies to the device."""
        torch.cuda.current_stream(self._out.device).wait_stream(self._out)

    def offload(self, tensors: Sequence[torch.Tensor]) -> list[_OffloadedTensor]:
        """Offloads more tensors of the layer whose input was offloaded last; `.get()` copies a tensor back."""
        layer = self._layer() if self._layer is not None else None
        return self._offload(tensors, layer or self._next_layer())

    def _next_layer(self) -> _Layer:
        below = self._layer() if self._layer is not None else None
        if below is not None:
            below.free_device_copy()  # not earlier: the device would wait for copies that have just started
        layer = _Layer(below)
        self._layer = weakref.ref(layer)
        return layer

    def _offload(self, tensors: Sequence[torch.Tensor], layer: _Layer) -> list[_OffloadedTensor]:
        offloaded = [_OffloadedTensor(self, x.detach(), layer) for x in tensors]
        layer.members += [weakref.ref(tensor) for tensor in offloaded]
        return offloaded

    def _acquire_buffer(self, num_bytes: int) -> _Pinned:
        """Returns a pinned buffer of at least this size; the copy stream waits until its last use is over."""
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
        """Unpins the free buffers, which are all too small for the current request.

        Longer sequences need larger buffers. Runs with `group_by_length` begin with their longest microbatch, but a
        resume within an epoch does not: without this, buffers of every size would stay pinned.
        """
        for buffer, used in self._free:
            if used is not None:
                used.synchronize()
            self.host_bytes -= buffer.num_bytes
        self._free.clear()

    def _release_buffer(self, buffer: _Pinned, last_use: list[torch.cuda.Event]) -> None:
        self._free.append((buffer, last_use[-1] if last_use else None))
        self._free.sort(key=lambda entry: entry[0].num_bytes)


class _Pinned:
    """Pinned host memory of exactly this size; torch's pinned allocator would round up to the next power of two, up to
    twice the planned size. Page-aligned: if two buffers share a page, CUDA pins only the first and rejects the
    other."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tensor = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)
        self.tensor.zero_()  # multithreaded; CUDA would fault in one page after another
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if failed:
            raise ResourceError(
                f"cannot pin {format_bytes(num_bytes)} of host memory for recompute: offload (CUDA error {failed})",
                "set recompute: block, or raise the locked memory limit (ulimit -l)",
            )
        # The finalizer references the tensor, so that its address stays valid until it is unpinned.
        weakref.finalize(self, _unpin, self.tensor).atexit = False


def _unpin(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class _Layer:
    """A layer's offloaded tensors, and the previous layer. Tensors reference their layer, which references them
    weakly."""

    def __init__(self, below: _Layer | None) -> None:
        self.below = below
        self.members: list[weakref.ref[_OffloadedTensor]] = []

    def prefetch_below(self) -> None:
        """Prefetches all tensors of the previous layer; called when this layer's backward pass starts."""
        below, self.below = self.below, None
        for tensor in [] if below is None else below.live_tensors():
            tensor.fetch()

    def free_device_copy(self) -> None:
        """Frees the device copies of all tensors of this layer."""
        for tensor in self.live_tensors():
            tensor.free_device_copy()

    def live_tensors(self) -> list[_OffloadedTensor]:
        """The tensors that autograd still references."""
        found = (member() for member in self.members)
        return [tensor for tensor in found if tensor is not None]


class _OffloadedTensor:
    """An offloaded tensor: on its way to the host, on the host, or on its way back."""

    def __init__(self, store: HostStore, x: torch.Tensor, layer: _Layer) -> None:
        self._store, self._layer = store, layer
        self._device: torch.Tensor | None = x
        """The device copy, until the next layer starts and after `fetch`."""
        self._buffer = store._acquire_buffer(x.numel() * x.element_size())
        flat = self._buffer.tensor[: x.numel() * x.element_size()].view(x.dtype)
        # With the device's strides (transposed heads, for instance), so that one contiguous copy is enough.
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(x)
        self._host = flat.as_strided(x.shape, x.stride()) if dense else flat.view(x.shape)
        self._arrived = torch.cuda.Event()
        self._uses: list[torch.cuda.Event] = []
        stream = store._out
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
            self._arrived.record(stream)
        self._cuda_device = x.device
        # The buffer is released when autograd frees this object; its next user waits for copies in flight.
        weakref.finalize(self, store._release_buffer, self._buffer, self._uses).atexit = False

    def free_device_copy(self) -> None:
        """Frees the device copy once the host copy is complete."""
        if self._device is not None:
            torch.cuda.current_stream(self._cuda_device).wait_event(self._arrived)
            self._device = None

    def fetch(self) -> None:
        """Starts the copy back to the device."""
        if self._device is not None:
            return
        current, back = torch.cuda.current_stream(self._cuda_device), self._store._back
        # Allocated on the stream that will read it. Work queued there may still use this memory, so the copy stream
        # waits for that work.
        self._device = torch.empty_like(self._host, device=self._cuda_device)
        back.wait_stream(current)
        with torch.cuda.stream(back):
            self._device.copy_(self._host, non_blocking=True)
            returned = torch.cuda.Event()
            returned.record(back)
        self._uses.append(returned)

    def get(self) -> torch.Tensor:
        """Returns the tensor on the device and prefetches those of the previous layer."""
        self.fetch()
        if self._uses:
            torch.cuda.current_stream(self._cuda_device).wait_event(self._uses[-1])
        self._layer.prefetch_below()
        x = self._device
        assert x is not None
        self._device = None  # autograd references it from here on
        return x
