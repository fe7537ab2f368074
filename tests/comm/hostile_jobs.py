"""Ranks of which one does not keep to the protocol."""

import json

import torch
import torch.distributed as dist

from gradwire.comm.base import Collective
from gradwire.comm.consistency import agree
from gradwire.comm.process_group import ProcessGroupComm, _all_gather
from gradwire.errors import GradwireError


def hostile_size_job(kind: str, size: int) -> str:
    """The last rank announces a message of this size; what becomes of it on the others."""
    comm = ProcessGroupComm(dist.group.WORLD)
    liar = comm.size - 1
    own = torch.zeros(8, dtype=torch.uint8)
    if comm.rank == liar:
        told = torch.full((1 if kind == "gather" else comm.size,), size)
        if kind == "gather":
            _all_gather(torch.empty(comm.size, dtype=torch.int64), told)
        else:
            dist.all_to_all_single(torch.empty_like(told), told)
        return "lied"
    buffers = [own] if kind == "gather" else [own] * comm.size
    try:
        comm.answer(Collective(kind, buffers, limits=[64] * comm.size))  # type: ignore[arg-type]
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def hostile_settings_job(text: bytes) -> str:
    """The last rank tells this as its settings."""
    comm = ProcessGroupComm(dist.group.WORLD)
    settings: dict[str, object] = {"spec": "efsign"}
    own = text if comm.rank == comm.size - 1 else json.dumps(settings).encode()
    try:
        if comm.rank == comm.size - 1:
            buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            comm.answer(Collective("gather", [buffer], limits=[1 << 20] * comm.size))
            return "lied"
        agree(comm, torch.device("cpu"), settings)
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
