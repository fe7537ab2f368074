"""Jobs of the tests of corrupted messages. Each runs on every rank."""

from typing import Any

import ddp_jobs as jobs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.comm.process_group import Begun

CORRUPTED = 1
"""The rank that receives a corrupted message."""


def corrupted_job(kind: str, later: int) -> tuple[str, int, bool, Tensor]:
    """Puts NaN into the end of a message of rank 2, in one collective of this kind, on one rank.

    Returns the error, and after some later steps the number of skipped ones, whether the link's
    state is finite, and the weights.
    """
    # One bucket: at a second one the others would wait for a rank that raised, until the timeout.
    model = DDP(jobs.mlp())
    link = gradwire.attach(model, "efsign", exchange="sharded")
    jobs.train(model, 2)
    begin = link._comm._begin
    pending = [dist.get_rank() == CORRUPTED]

    def corrupting(collective: Any) -> Begun:
        works, results = begin(collective)

        def corrupted() -> list[Tensor]:
            received = results()
            if pending[0] and collective.kind == kind:
                pending[0] = False
                # Before the flag, which takes the last 4 bytes.
                received[2][-8:-4].view(torch.float32)[:] = float("nan")
            return received

        return works, corrupted

    link._comm._begin = corrupting  # type: ignore[method-assign]
    model.zero_grad()
    text = jobs.failure_of(lambda: jobs.loss_of(model, 2).backward())
    jobs.train(model, later, first=3)
    skipped = int(str(link.stats()["skipped"]))
    return text, skipped, _is_finite(link.state_dict()), jobs.weights(model)


def _is_finite(state: object) -> bool:
    if isinstance(state, Tensor):
        return bool(state.isfinite().all()) if state.is_floating_point() else True
    return all(map(_is_finite, state.values())) if isinstance(state, dict) else True
