"""Gathers the states of all ranks on rank 0, for checkpoints that are one file."""

from collections.abc import Mapping
from io import BytesIO

import torch
import torch.distributed as dist


def gather_states(state: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Returns the states of all ranks by name on rank 0, and the own one on other ranks.

    Ranks send one after the other, so that only rank 0 holds more than two.
    """
    whole = dict(state)
    # gloo cannot send from a GPU.
    device = device if dist.get_backend() == "nccl" else torch.device("cpu")
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == rank:
            _send(state, device)
        elif dist.get_rank() == 0:
            whole.update(_receive(rank, device))
    return whole


def _send(state: Mapping[str, object], device: torch.device) -> None:
    file = BytesIO()
    torch.save(dict(state), file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    dist.send(torch.tensor([content.numel()], device=device), 0)
    dist.send(content, 0)


def _receive(rank: int, device: torch.device) -> dict[str, object]:
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(length, rank)
    content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(content, rank)
    state: dict[str, object] = torch.load(
        BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True
    )
    return state
