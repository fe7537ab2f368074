"""Caches as a training step leaves them: full of something else."""

import torch

CACHE_BYTES = 64 << 20
"""More than the caches of a processor hold for one worker."""


class Cold:
    """Takes from a processor's caches what they have; on other devices nothing is done."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._other = torch.zeros(CACHE_BYTES, dtype=torch.uint8) if on_cpu else None

    def cool(self) -> None:
        if self._other is not None:
            self._other.add_(1)
