"""torch.autocast for emulated tensors.

CUDA's autocast checks in C++ whether a tensor is on a GPU, and would not cast emulated tensors. The CPU's autocast
casts them to the same dtype; both cast the operands of matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

KEY = torch._C.DispatchKey.AutocastCPU


class EmulatedAutocast(torch.autocast):
    """Enables CUDA's autocast, whose state the code queries, and the CPU's, which casts."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type, *args, **kwargs)
        self._casting: torch.autocast | None = None
        if device_type == "cuda":
            self._casting = _PLAIN(
                "cpu", dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
            )

    def __enter__(self) -> Any:
        entered = super().__enter__()
        if self._casting is not None:
            self._casting.__enter__()
            self._before = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
        return entered

    def __exit__(self, *error: Any) -> Any:
        if self._casting is not None:
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, self._before)
            self._casting.__exit__(*error)
        return super().__exit__(*error)


_PLAIN = torch.autocast


@contextmanager
def emulated_autocast() -> Iterator[None]:
    """In this context, torch.autocast("cuda") casts emulated tensors."""
    with (
        patch.object(torch, "autocast", EmulatedAutocast),
        patch.object(torch.amp, "autocast", EmulatedAutocast),
    ):
        yield
