"""Jobs of the tests of compressed optimisers with the automatic mode; each returns plain values."""

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from optim_jobs import KINDS, ddp_model, steps, weights_of
from torch import Tensor

import gradwire
from gradwire.auto.candidates import Candidate
from gradwire.auto.runtime import AutoRuntime
from gradwire.comm.cost_model import LinkModel
from gradwire.control.timing import ModelClock
from gradwire.optim.base import CompressedOptimizer


class LogLines(logging.Handler):
    """Collects the messages of the package."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def advised() -> list[tuple[list[str], str, list[dict[str, Any]]]]:
    """Returns what attach logs of optimisers, and what its line makes of each."""
    log, handler = logging.getLogger("gradwire"), LogLines()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    found = []
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.002, betas=(0.8, 0.95)),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.AdamW(
            [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
        ),
        lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        model = ddp_model()
        optimizer = make(model)
        handler.lines.clear()
        gradwire.attach(model, "auto:risk=low", optimizer=optimizer).detach()
        lines = [line for line in handler.lines if "gradwire.optim" in line]
        made = ""
        groups: list[dict[str, Any]] = []
        # Rank 0 logs the line; the others run it, too.
        texts: list[Any] = [lines[0].partition("use: ")[2] if lines else None]
        dist.broadcast_object_list(texts)
        if texts[0] is not None:
            names = {"gradwire": gradwire, "model": model, "optimizer": optimizer}
            exec(texts[0], names)
            new: Any = names["optimizer"]
            made = f"{type(new).__module__}.{type(new).__name__}"
            keys = ("lr", "betas", "eps", "weight_decay")
            groups = [{key: group[key] for key in keys} for group in new.param_groups]
            new.link.detach()
        found.append((lines, made, groups))
    log.removeHandler(handler)
    return found


def automatic(kind: str) -> tuple[Tensor, Tensor, Any, Any, bool]:
    """Returns the weights of a straight and of a resumed run, and what auto chose in both."""

    def start() -> CompressedOptimizer:
        optimizer = KINDS[kind](model, lr=1e-3, compress="auto")
        runtime = optimizer.link._engine.observer
        assert isinstance(runtime, AutoRuntime)
        # A link of 1 Mbit/s, so that times do not depend on the machine.
        runtime._clock = ModelClock(optimizer.link._comm.meter, LinkModel(1e-4, 1e6), 0.001)
        runtime.search.table.link = LinkModel(1e-4, 1e6)
        return optimizer

    model = ddp_model()
    optimizer = start()
    steps(model, optimizer, 0, 55)
    before: Any = optimizer.link.stats()["controller"]
    sparse = any(option.family == "sparsification" for option in options(optimizer))
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 55, 3)
    straight = weights_of(model)
    optimizer.link.detach()
    model = ddp_model()
    model.module.load_state_dict(saved[0])
    optimizer = start()
    optimizer.load_state_dict(saved[1])
    after = optimizer.link.stats()["controller"]
    steps(model, optimizer, 55, 3)
    resumed = weights_of(model)
    optimizer.link.detach()
    return straight, resumed, before, after, sparse


def options(optimizer: CompressedOptimizer) -> list[Candidate]:
    runtime = optimizer.link._engine.observer
    assert isinstance(runtime, AutoRuntime)
    return runtime.search.table.options
