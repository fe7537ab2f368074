"""The device memory of one session, beside those of other sessions in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Allocator(ABC):
    """Counts the bytes of live tensors on a device."""

    @abstractmethod
    def allocated(self) -> int:
        """Returns the bytes of all live tensors."""

    @abstractmethod
    def peak(self) -> int:
        """Returns the most bytes since the last `reset`."""

    @abstractmethod
    def reset(self) -> None: ...


class CudaAllocator(Allocator):
    """The allocator of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class DeviceMemory:
    """The most memory that the work in `counted` has held, which may be in several pieces.

    What one piece leaves behind, such as an optimiser's moments, is held by the next ones, too.
    """

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator, self._held, self._peak = allocator, 0, 0

    @classmethod
    def on(cls, device: torch.device) -> "DeviceMemory":
        """Returns the memory of a session on a device; on a CPU nothing is counted."""
        return cls(CudaAllocator(device) if device.type == "cuda" else None)

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes, or None where none are counted."""
        return None if self._allocator is None else self._peak

    @contextmanager
    def counted(self) -> Iterator[None]:
        if self._allocator is None:
            yield
            return
        before = self._allocator.allocated()
        self._allocator.reset()
        try:
            yield
        finally:
            self._peak = max(self._peak, self._held + self._allocator.peak() - before)
            self._held += self._allocator.allocated() - before
