"""Every decentralised method with small settings, and the jobs of real ranks in tests."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from local_workers import Method, momentum_sgd, small_model, take_step, weights
from torch import Tensor

from gradwire.decentralized import BEER, CGT, DSGD, ChocoSGD, Graph
from gradwire.errors import ConfigError, PeerError

Setting = tuple[Method, tuple[Any, ...], dict[str, Any]]

PATH = Graph([(0, 1), (1, 2), (2, 3)])

METHODS: dict[str, Setting] = {
    "dsgd": (DSGD, (), {}),
    "dsgd-one-peer": (DSGD, (), {"topology": "one_peer", "sync_every": 2}),
    "choco": (ChocoSGD, ("topk:ratio=0.1",), {"gamma": 0.3}),
    "choco-directed": (ChocoSGD, ("efsign",), {"gamma": 0.2, "topology": "exponential"}),
    "choco-rare": (ChocoSGD, ("int4",), {"gamma": 0.5, "topology": "star", "sync_every": 3}),
    "choco-variable": (ChocoSGD, ("threshold:value=0.001",), {"gamma": 0.3, "topology": PATH}),
    "choco-random": (ChocoSGD, ("randomk:ratio=0.2 | qsgd:bits=4",), {"gamma": 0.1}),
    "cgt": (CGT, ("topk:ratio=0.1 | sign",), {"gamma": 0.2}),
    "cgt-damped": (CGT, ("qsgd:bits=4",), {"gamma": 0.2, "alpha": 0.3, "topology": "torus"}),
    "beer": (BEER, ("topk:ratio=0.2",), {"gamma": 0.2, "topology": "complete"}),
}


def trained_rank(name: str, steps: int) -> tuple[Tensor, Tensor, dict[str, object]]:
    """Returns this rank's weights, their mean over all ranks, and its statistics."""
    method, args, settings = METHODS[name]
    model = small_model()
    optimizer = momentum_sgd(model)
    with method(model, optimizer, *args, **settings) as worker:
        for step in range(steps):
            take_step(model, optimizer, step, dist.get_rank())
        with worker.averaged():
            mean = weights(model)
        return weights(model), mean, worker.stats()


def silent_neighbor(timeout_s: float) -> tuple[str, float]:
    """Lets rank 1 stop taking steps; returns each rank's error, and after how long it came."""
    group = dist.new_group(range(4), timeout=timedelta(seconds=timeout_s), backend="gloo")
    model = small_model()
    optimizer = momentum_sgd(model)
    start_s = time.monotonic()
    try:
        with ChocoSGD(model, optimizer, "topk:ratio=0.1", gamma=0.3, process_group=group):
            take_step(model, optimizer, 0, dist.get_rank())
            if dist.get_rank() == 1:
                time.sleep(2 * timeout_s)
                return "silent", 0.0
            start_s = time.monotonic()
            for step in range(1, 5):
                take_step(model, optimizer, step, dist.get_rank())
    except PeerError as error:
        return str(error), time.monotonic() - start_s
    return "no error", 0.0


def differing_settings() -> str:
    """Returns the error of ranks that have different topologies."""
    model = small_model()
    topology = "ring" if dist.get_rank() else "complete"
    method = ChocoSGD(model, momentum_sgd(model), gamma=0.3, topology=topology)
    try:
        with method:
            return ""
    except ConfigError as error:
        return str(error)


def dies(rank: int, port: int, results: Any) -> None:
    """Runs in a process of its own: rank 1 of 4 ends without a word after its first step."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4, timeout=timedelta(seconds=40))
    model = small_model()
    optimizer = momentum_sgd(model)
    start_s = time.monotonic()
    try:
        with ChocoSGD(model, optimizer, "topk:ratio=0.1", gamma=0.3):
            take_step(model, optimizer, 0, rank)
            if rank == 1:
                os._exit(1)
            start_s = time.monotonic()
            for step in range(1, 5):
                take_step(model, optimizer, step, rank)
        results.put((rank, "no error", 0.0))
    except PeerError as error:
        results.put((rank, str(error), time.monotonic() - start_s))
