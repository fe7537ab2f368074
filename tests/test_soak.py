"""Twenty thousand steps: memory, threads, open files and step time do not grow."""

import gc
import os
import resource
import threading
from pathlib import Path
from time import process_time

import pytest
import torch

import gradwire

STEPS, TENTHS = 20_000, 10
GROWN_KB = 6_000
"""A leak of a third of a kilobyte per step would exceed it."""


def rss_kb() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.timeout(240)
def test_twenty_thousand_steps() -> None:
    """Two workers, one small layer; two methods in turn, the cheap one more often."""
    specs = ("topk:ratio=0.05", "efsign")
    order = (0, *[1] * 9)
    sims = [gradwire.simulate({"w": torch.zeros(33, 32)}, spec, workers=2) for spec in specs]
    grads = [[{"w": torch.randn(33, 32)} for _ in range(2)] for _ in range(7)]
    times, memory, held = [], [], []
    for _ in range(TENTHS):
        start = process_time()
        for step in range(STEPS // TENTHS // len(order)):
            for which in order:
                sims[which].step(grads[step % len(grads)])
        times.append(process_time() - start)
        memory.append(rss_kb())
        held.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert [sim.stats()["steps"] for sim in sims] == [2_000, 18_000]
    assert memory[-1] < memory[0] + GROWN_KB
    assert held[-1] == held[0]
    # CPU time of this process, but other processes share its caches.
    assert min(times[5:]) < 1.5 * sorted(times)[TENTHS // 2]
