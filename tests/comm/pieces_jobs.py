"""Collectives that run in several pieces at once, because they are long."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import process_group
from gradwire.comm.base import Collective
from gradwire.comm.process_group import ProcessGroupComm


def message(sender: int, receiver: int, length: int) -> Tensor:
    """Returns bytes that no other pair of ranks sends."""
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return torch.randint(256, (length,), dtype=torch.uint8, generator=generator)


def split_job(kind: str, lengths: list[int]) -> tuple[list[Tensor], int, int]:
    """Returns what this rank receives, the number of torch's works, and the bytes counted.

    Rank i sends `lengths[i]` bytes to all others (gather), or receives as many from each of them.
    """
    comm = ProcessGroupComm(dist.group.WORLD)
    rank = comm.rank
    if kind == "gather":
        collective = Collective("gather", [message(rank, 0, lengths[rank])], sizes=lengths)
    else:
        buffers = [message(rank, to, length) for to, length in enumerate(lengths)]
        collective = Collective("all_to_all", buffers, sizes=[lengths[rank]] * comm.size)
    with patch.object(process_group, "PIECES_BYTES", 32):
        pending = comm.start(comm.stage(collective))
    return pending.wait(), len(pending.works), comm.meter.sent_bytes
