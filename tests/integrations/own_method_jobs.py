"""Functions that run on every rank in test_own_methods.py."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

SCRIPT = """
from dataclasses import dataclass
from gradwire.compressors.topk import TopK
from gradwire.control.schedule import Schedule
from gradwire.memory.residual import Residual

@dataclass(frozen=True)
class Mine(TopK):
    ratio: float = {ratio}

    def decode_add(self, out, messages, weight, ctx):
        TopK.decode_add(self, out, messages, {factor} * weight, ctx)

@dataclass(frozen=True)
class Kept(Residual):
    decay: float = {decay}

@dataclass(frozen=True)
class Plan(Schedule):
    last: float = {last}

class Other(Mine):
    pass
"""
"""A script with methods of a user's own."""

USUAL = {"ratio": 0.1, "factor": 1.0, "decay": 0.9, "last": 0.1}


def script(**values: object) -> Any:
    """Returns the script as a module of the same name on all ranks."""
    module = ModuleType("__main__")
    exec(SCRIPT.format(**{**USUAL, **values}), vars(module))
    return module


def failure_of(case: str) -> str:
    """Attaches methods that differ on rank 1 in one respect; returns the error, or nothing."""
    odd = dist.get_rank() == 1
    different = {"ratio": 0.2, "factor": 2.0, "decay": 0.8, "last": 0.2}
    own = script(**{case: different[case]} if odd and case in different else {})
    ddp = DDP(nn.Linear(40, 40))
    try:
        if case == "switch":
            link = gradwire.attach(ddp, own.Mine())
            link.switch(own.Other() if odd else own.Mine())
        elif case == "class":
            gradwire.attach(ddp, own.Other() if odd else own.Mine())
        elif case == "catalogue":
            # Another module of this file name, as a user's own topk.py would be.
            own.Mine.__module__ = "topk"
            gradwire.attach(ddp, own.Mine() if odd else gradwire.TopK(ratio=0.1))
        elif case == "reducer":
            gradwire.Reducer(nn.Linear(40, 40), own.Other() if odd else own.Mine())
        else:
            gradwire.attach(ddp, own.Mine(), memory=own.Kept(), controller=own.Plan())
    except gradwire.ConfigError as error:
        return str(error)
    return ""


def trained() -> tuple[Tensor, str]:
    """Trains with a method of a script, which is the same on all ranks."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(40, 40))
    link = gradwire.attach(ddp, script().Mine(), memory=script().Kept())
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(8, 40)).square().sum().backward()
    assert ddp.module.weight.grad is not None
    return ddp.module.weight.grad.clone(), str(link.stats()["spec"])
