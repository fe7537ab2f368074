"""The device memory of a session: with an allocator by hand, and none on a CPU."""

import torch

from gradwire.bench.worker.device_memory import Allocator, DeviceMemory


class ByHand(Allocator):
    """An allocator whose bytes the test sets."""

    def __init__(self) -> None:
        self._now = self._most = 0

    def change(self, by: int) -> None:
        self._now += by
        self._most = max(self._most, self._now)

    def allocated(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._most

    def reset(self) -> None:
        self._most = self._now


def test_what_a_session_holds_and_the_most_it_held() -> None:
    """Of two sessions in turn: the memory of the other does not count."""
    device = ByHand()
    one, other = DeviceMemory(device), DeviceMemory(device)
    with one.counted():
        device.change(100)
    with other.counted():
        device.change(1000)
    with one.counted():
        device.change(30)
        device.change(-10)
    assert (one.peak_bytes, other.peak_bytes) == (130, 1000)
    with other.counted():
        device.change(5000)
        device.change(-5000)
    with one.counted():
        device.change(7)
        device.change(-50)
    assert (one.peak_bytes, other.peak_bytes) == (130, 6000)


def test_a_cpu_counts_none() -> None:
    memory = DeviceMemory.on(torch.device("cpu"))
    with memory.counted():
        torch.zeros(1000)
    assert memory.peak_bytes is None
