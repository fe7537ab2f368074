"""Gathers the states of all ranks on rank 0, for checkpoints that are one file."""

from collections.abc import Mapping
from io import BytesIO

import torch
import torch.distributed as dist


def gathered(state: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """On rank 0 the states of all ranks, each under its name; elsewhere the own one.

    Ranks send one after the other, so that nobody but rank 0 holds more than two.
    """
    whole = dict(state)
    # gloo takes nothing from a GPU.
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == rank:
            _send(state, where)
        elif dist.get_rank() == 0:
            whole.update(_receive(rank, where))
    return whole


def _send(state: Mapping[str, object], where: torch.device) -> None:
    file = BytesIO()
    torch.save(dict(state), file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(where)
    dist.send(torch.tensor([content.numel()], device=where), 0)
    dist.send(content, 0)


def _receive(rank: int, where: torch.device) -> dict[str, object]:
    length = torch.empty(1, dtype=torch.int64, device=where)
    dist.recv(length, rank)
    content = torch.empty(int(length), dtype=torch.uint8, device=where)
    dist.recv(content, rank)
    state: dict[str, object] = torch.load(
        BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True
    )
    return state
