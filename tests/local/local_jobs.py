"""Every local method with small settings, and the jobs of real ranks in tests."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_workers import Method, plain_sgd, small_model, take_step, weights
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.errors import ConfigError
from gradwire.local import (
    CSER,
    AsyncQsparseLocalSGD,
    BlockCSER,
    DiLoCo,
    LocalSGD,
    MuLoCo,
    QsparseLocalSGD,
    SparseLoCo,
)

Setting = tuple[Method, tuple[Any, ...], dict[str, Any]]

METHODS: dict[str, Setting] = {
    "qsparse": (QsparseLocalSGD, ("topk:ratio=0.1 | qsgd:bits=4",), {"sync_every": 4}),
    "cser": (CSER, ("topk:ratio=0.1", "grbs:ratio=0.25,block=64"), {"sync_every": 4}),
    "cser-pl": (CSER, (None, "topk:ratio=0.1 | sign"), {"sync_every": 4}),
    "cser-blocks": (
        BlockCSER,
        ("grbs:ratio=0.1,block=16", "grbs:ratio=0.25,block=16"),
        {"sync_every": 4},
    ),
    "local": (LocalSGD, (), {"sync_every": 4}),
    "local-delayed": (LocalSGD, (), {"sync_every": 4, "delay": 3}),
    "qsparse-delayed": (QsparseLocalSGD, ("topk:ratio=0.1",), {"sync_every": 4, "delay": 2}),
    "diloco": (DiLoCo, ("codebook:bits=8,spread=12",), {"sync_every": 4}),
    "diloco-delayed": (DiLoCo, (), {"sync_every": 4, "delay": 4}),
    "streaming": (DiLoCo, ("fp16",), {"sync_every": 4, "fragments": 2, "delay": 1}),
    "sparseloco": (SparseLoCo, ("chunktopk:k=8,chunk=64 | codebook",), {"sync_every": 4}),
    "muloco": (MuLoCo, ("codebook:bits=2",), {"sync_every": 4}),
    "diloco-bf16": (DiLoCo, ("fp16",), {"sync_every": 4, "anchors": "bf16"}),
    "diloco-host": (DiLoCo, (), {"sync_every": 4, "fragments": 2, "delay": 1, "anchors": "host"}),
    "qsparse-sign": (QsparseLocalSGD, ("topk:ratio=0.1 | sign",), {"sync_every": 4}),
}

DENSE_MEANS = {"local", "local-delayed", "cser-blocks"}
"""Methods that have no check of non-finite parameters: a dense mean spreads them."""

ALL_METHODS: dict[str, Setting] = {
    **METHODS,
    # Its workers sync at their own times, so that real ones are not reproducible.
    "async": (AsyncQsparseLocalSGD, ("topk:ratio=0.1",), {"sync_every": 4}),
}


def trained_rank(name: str, steps: int) -> tuple[Tensor, Tensor, dict[str, object]]:
    """Returns this rank's weights, their mean over all ranks, and its statistics."""
    method, args, settings = METHODS[name]
    model = small_model()
    optimizer = plain_sgd(model)
    with method(model, optimizer, *args, **settings) as worker:
        for step in range(steps):
            take_step(model, optimizer, step, dist.get_rank())
        with worker.averaged():
            mean = weights(model)
        torch.manual_seed(0)
        return weights(model), mean, worker.stats()


def twice_on_rank() -> dict[str, str]:
    """Returns the errors of parameters owned by an integration and a local method at once."""
    model = small_model()
    ddp, optimizer = DDP(model), plain_sgd(model)
    worker = QsparseLocalSGD(model, optimizer, sync_every=4)
    link = gradwire.attach(ddp, "efsign")
    found = {"attached first": _error_of(worker.__enter__)}
    link.detach()
    with worker:
        found["entered first"] = _error_of(lambda: gradwire.attach(ddp, "efsign"))
        found["reducer"] = _error_of(lambda: gradwire.Reducer(model, "efsign"))
    gradwire.attach(ddp, "efsign").detach()
    with worker:
        return found


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""
