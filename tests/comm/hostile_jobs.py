"""Jobs in which one rank violates the protocol."""

import json

import torch
import torch.distributed as dist

from gradwire.comm.base import Collective
from gradwire.comm.consistency import check_equal_settings
from gradwire.comm.process_group import ProcessGroupComm, _all_gather
from gradwire.errors import GradwireError


def hostile_size_job(kind: str, size: int) -> str:
    """Returns each rank's error where the last one announces a message of this size."""
    comm = ProcessGroupComm(dist.group.WORLD)
    liar = comm.size - 1
    own = torch.zeros(8, dtype=torch.uint8)
    if comm.rank == liar:
        announced = torch.full((1 if kind == "gather" else comm.size,), size)
        if kind == "gather":
            _all_gather(torch.empty(comm.size, dtype=torch.int64), announced)
        else:
            dist.all_to_all_single(torch.empty_like(announced), announced)
        return "lied"
    buffers = [own] if kind == "gather" else [own] * comm.size
    try:
        comm.run(Collective(kind, buffers, limits=[64] * comm.size))  # type: ignore[arg-type]
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def hostile_settings_job(text: bytes) -> str:
    """Returns each rank's error where the last one sends this text as its settings."""
    comm = ProcessGroupComm(dist.group.WORLD)
    settings: dict[str, object] = {"spec": "efsign"}
    own = text if comm.rank == comm.size - 1 else json.dumps(settings).encode()
    try:
        if comm.rank == comm.size - 1:
            buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            comm.run(Collective("gather", [buffer], limits=[1 << 20] * comm.size))
            return "lied"
        check_equal_settings(comm, torch.device("cpu"), settings)
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
