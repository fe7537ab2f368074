"""Messages between neighboring ranks, over a process group."""

import torch
import torch.distributed as dist

from gradwire.comm.base import Collective, Neighbors
from gradwire.comm.process_group import ProcessGroupComm


def swapped(sizes_known: bool, checksum: bool) -> tuple[list[list[int]], int, int]:
    """Sends a message of rank + 1 bytes along a path of ranks; returns what came, and the bytes."""
    comm = ProcessGroupComm(dist.group.WORLD, checksum=checksum)
    rank = comm.rank
    peers = tuple(other for other in (rank - 1, rank + 1) if 0 <= other < comm.size)
    buffer = torch.full((rank + 1,), rank, dtype=torch.uint8)
    sizes = [peer + 1 for peer in peers] if sizes_known else None
    limits = None if sizes_known else [4] * len(peers)
    collective = Collective("neighbors", [buffer], sizes, limits, neighbors=Neighbors(peers, peers))
    received = [message.tolist() for message in comm.run(collective)]
    return received, comm.meter.sent_bytes, comm.meter.received_bytes
