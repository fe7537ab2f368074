"""GPU work that runs concurrently with the computation of gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.futures import Future


class SideStream:
    """A CUDA stream beside the one that computes gradients; on a CPU all methods do nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # What it runs is short, and other ranks wait for it.
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if is_gpu else None
        self._cpu_threads = torch.get_num_threads()

    def configure_thread(self) -> None:
        """Gives a new thread the core count and device of its creator, not all cores and GPU 0."""
        # OpenMP keeps its number of threads by thread, and CUDA its device.
        torch.set_num_threads(self._cpu_threads)
        if self.stream is not None:
            torch.cuda.set_device(self.device)

    def future(self) -> "Future[Tensor]":
        return Future(devices=[] if self.stream is None else [self.device])

    def record_event(self) -> torch.cuda.Event | None:
        """Returns an event that marks the current point of the caller's stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Runs the body on the side stream, which first waits for the event."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if event is not None:
                self.stream.wait_event(event)
            yield

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Makes the caller's stream wait for an event of the side stream."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
