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


class Guarded:
    """Room for one tensor at a time, up to `nbytes`, at either end of it."""

    def __init__(self, nbytes: int) -> None:
        self._room = -(-nbytes // _PAGE) * _PAGE
        self._pages = mmap.mmap(-1, self._room + 2 * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        libc = ctypes.CDLL(None, use_errno=True)
        for start in (base, base + _PAGE + self._room):
            if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(_PAGE), _NO_ACCESS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # One tensor for all, so that slices lie as oddly in their storage as they do in memory.
        self._bytes = torch.frombuffer(
            self._pages, dtype=torch.uint8, count=self._room, offset=_PAGE
        )

    def hold(self, tensor: Tensor, *, at_end: bool) -> Tensor:
        """A copy of a flat tensor that begins or ends beside a forbidden page.

        The one that was held before is overwritten.
        """
        raw = tensor.view(torch.uint8)
        if raw.numel() > self._room:
            return tensor.clone()
        start = self._room - raw.numel() if at_end else 0
        place = self._bytes[start : start + raw.numel()]
        place.copy_(raw)
        return place.view(tensor.dtype)
