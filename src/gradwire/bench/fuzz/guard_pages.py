"""Memory between two inaccessible pages: an access one byte beyond it kills the process.

Compiled loops check no bounds. A message or a gradient that ends at such a page exposes a loop that
reads or writes too far.
"""

import ctypes
import mmap
import os

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0


class GuardedMemory:
    """Memory for one tensor at a time of up to `nbytes`, placed at either end."""

    def __init__(self, nbytes: int) -> None:
        self._size = -(-nbytes // _PAGE) * _PAGE
        self._pages = mmap.mmap(-1, self._size + 2 * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        libc = ctypes.CDLL(None, use_errno=True)
        for start in (base, base + _PAGE + self._size):
            if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(_PAGE), _NO_ACCESS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # One tensor for all, so that slices are as misaligned in their storage as in memory.
        self._bytes = torch.frombuffer(
            self._pages, dtype=torch.uint8, count=self._size, offset=_PAGE
        )

    def hold(self, tensor: Tensor, *, at_end: bool) -> Tensor:
        """Copies a flat tensor so that it begins or ends beside an inaccessible page.

        Overwrites the tensor that was held before.
        """
        raw = tensor.view(torch.uint8)
        if raw.numel() > self._size:
            return tensor.clone()
        start = self._size - raw.numel() if at_end else 0
        region = self._bytes[start : start + raw.numel()]
        region.copy_(raw)
        return region.view(tensor.dtype)
