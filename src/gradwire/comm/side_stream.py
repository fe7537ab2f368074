"""Work on a GPU that goes on beside the computation of gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.futures import Future


class SideStream:
    """A stream beside the one that computes gradients; on a CPU there is none and no need."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cpu_threads = torch.get_num_threads()

    def settle(self) -> None:
        """Makes a new thread, which would take all cores and the first GPU, like its maker."""
        # OpenMP keeps its number of threads by thread, and CUDA its device.
        torch.set_num_threads(self._cpu_threads)
        if self.stream is not None:
            torch.cuda.set_device(self.device)

    def future(self) -> "Future[Tensor]":
        return Future(devices=[] if self.stream is None else [self.device])

    def mark(self) -> torch.cuda.Event | None:
        """The point that the stream has reached on which the caller computes."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work that starts on the side when the computing stream has passed the mark."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if mark is not None:
                self.stream.wait_event(mark)
            yield

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Has the computing stream wait for a point that the side has reached or will reach."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)
