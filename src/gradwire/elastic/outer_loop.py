"""DiLoCo and SparseLoCo inside a torchft Manager: a sync is a step of the Manager.

All replicas that are present move the anchor together. A replica that joins waits for their next
sync, in which one of them hands it anchor, momenta, buffers and the inner optimiser's state.
"""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.comm.base import CollectiveProgram, Comm, run_program
from gradwire.elastic.exchange import TwoPhaseExchange
from gradwire.elastic.legality import check_means, check_one_level
from gradwire.elastic.managed_comm import ManagedComm
from gradwire.elastic.manager import KEY, Manager, check_manager
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.local.base import drift_plan
from gradwire.local.fragment import Fragment, OuterSGD
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, Streaming
from gradwire.local.workers import Wait, Workers
from gradwire.memory.residual import Residual
from gradwire.policies import MethodSpec
from gradwire.version import VERSION

log = logging.getLogger("gradwire")

S = TypeVar("S", bound="ElasticOuterLoop")


class ManagedReplicas(Workers):
    """The replicas of a Manager, which communicate only in its steps."""

    def __init__(self, manager: Manager) -> None:
        self._comm: Comm = ManagedComm(manager)
        self.rank, self.size = 0, 1
        self.meter = self.aux_meter = self._comm.meter

    def run(self, program: CollectiveProgram[None], *, auxiliary: bool = False) -> None:
        run_program(program, self._comm)

    def start(self, program: CollectiveProgram[None], *, blocking: bool = False) -> Wait:
        raise ConfigError("elastic: a sync cannot run in the background")

    def check_finished(self) -> None:
        pass

    def shutdown(self, *, wait: bool) -> None:
        pass

    def prepare(self, node: int | None) -> None:
        assert node is None, "replicas form no nodes"


class ElasticOuterLoop(OuterLoopMethod):
    """A local method whose workers are the replicas of a torchft Manager.

    The context is entered by a replica that joins, and it waits there for the next sync of those
    that are present. If a sync fails, nothing of it counts, and it is tried again at once with the
    replicas that are left: their drifts are still there.
    """

    def __init__(
        self,
        manager: object,
        model: nn.Module,
        optimizer: Optimizer,
        compression: DriftCompression,
        outer: OuterSGD,
        sync_every: int,
        seed: int,
    ) -> None:
        method = type(self).__name__
        check_manager(method, manager)
        self._manager = cast(Manager, manager)
        if self._manager._use_async_quorum:
            raise ConfigError(
                f"{method}: the Manager must have use_async_quorum=False: a replica that joins "
                "needs the anchor before it takes its first step"
            )
        check_one_level(method, compression.exchange)
        workers = ManagedReplicas(self._manager)
        OuterLoopMethod.__init__(
            self,
            model,
            optimizer,
            compression,
            outer,
            Streaming(),
            sync_every,
            workers,
            seed,
            broadcast=False,
        )
        [self._fragment_of_all] = self._fragments
        self._plan(1)
        self._exchange = TwoPhaseExchange(
            self._manager, self._fragment_of_all.engine, self._plan, self._settings, checksum=False
        )
        workers.meter = self._exchange.meter
        self._received = False
        self._own_stats = self._exchange.counts
        self._manager.register_state_dict_fn(KEY, self._load, self._save)

    def __enter__(self: S) -> S:
        """Joins the other replicas; returns when this one has the anchor of all."""
        OuterLoopMethod.__enter__(self)
        try:
            self._sync_until_committed()
        except BaseException as error:
            OuterLoopMethod.__exit__(self, error)
            raise
        return self

    def averaged(self) -> Any:
        """Raises ConfigError: replicas communicate only in steps of the Manager."""
        raise ConfigError(
            f"{type(self).__name__}: evaluate after a sync, where all replicas have equal "
            "parameters; a mean between syncs would need a step of the Manager"
        )

    def _startup(self) -> CollectiveProgram[None]:
        # Replicas compare their settings in every new quorum.
        self._initialize()
        yield from ()

    def _sync(self, number: int, fragment: Fragment) -> None:
        self._drop_residuals_after_decay(fragment)
        self._sync_until_committed()
        self.syncs += 1

    def _sync_until_committed(self) -> None:
        """Tries until the Manager commits; it raises after `max_retries` failures of its own."""
        while not self._try_sync():
            log.warning("the sync was not committed and is tried again")

    def _try_sync(self) -> bool:
        fragment, self._received = self._fragment_of_all, False
        # A replica that joins or has missed a sync loads the state of a peer here.
        self._manager.start_quorum()
        fragment.capture_drift()
        message = list(fragment.drift), list(fragment.drift.values())
        averaged = self._exchange.average([message], silent=self._received)
        committed = self._manager.should_commit()
        self._exchange.finish(committed=committed)
        if committed and averaged:
            fragment.apply_mean()
        else:
            fragment.discard_mean()
        if self._exchange.nonfinite is not None:
            raise self._exchange.nonfinite
        return committed

    def _save(self) -> dict[str, object]:
        """Returns what a replica that joins needs; the Manager asks for it in a quorum."""
        fragment = self._fragment_of_all
        return {
            "anchor": fragment.anchor,
            "momentum": fragment.momentum,
            "buffers": dict(self.model.named_buffers()),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of a peer; what this replica has not sent is dropped."""
        fragment = self._fragment_of_all
        self._received = True
        self._exchange.state_received()
        if _shapes(state["anchor"]) != _shapes(fragment.anchor):
            # Another model: the introduction that follows names the differences.
            return
        with torch.no_grad():
            for name, anchor in fragment.anchor.items():
                anchor.copy_(state["anchor"][name])
                parameter = fragment.parameters[name]
                parameter.copy_(anchor.view(parameter.shape))
            for name, momentum in fragment.momentum.items():
                momentum.copy_(state["momentum"][name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        for optimizer, its_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)

    def _plan(self, size: int) -> Plan:
        c, method = self._compression, type(self).__name__
        tensors = self._fragment_of_all.parameters
        plan = drift_plan(method, c.compressor, c.memory, c.exchange, tensors, size)
        check_means(method, plan, "leave it out")
        return plan

    def _settings(self, plan: Plan) -> Mapping[str, object]:
        """Returns what must be equal on all replicas."""
        return {
            **self._identity(),
            **plan.identity(),
            "version": VERSION,
            "nan_policy": self._compression.nan_policy,
            "code": plan.code_digests(),
        }


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class DiLoCo(ElasticOuterLoop):
    """`gradwire.local.DiLoCo` inside a torchft Manager, for the whole model and without a delay.

    Every `sync_every` steps the anchor takes a Nesterov step along the mean drift of the replicas
    that took these steps. The Manager needs use_async_quorum=False and a quorum_timeout that is
    longer than the time between two syncs; the loop calls neither start_quorum nor should_commit.
    """

    def __init__(
        self,
        manager: object,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec = "none",
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        memory: str | None = None,
        exchange: str = "auto",
        seed: int = 0,
    ) -> None:
        compression = DriftCompression(compressor, memory, exchange, "raise")
        outer = OuterSGD(outer_lr, outer_momentum, nesterov)
        ElasticOuterLoop.__init__(
            self, manager, model, optimizer, compression, outer, sync_every, seed
        )


class SparseLoCo(ElasticOuterLoop):
    """`gradwire.local.SparseLoCo` inside a torchft Manager, for the whole model.

    What a replica has not sent stays in its residual as long as it is present. The Manager is that
    of `DiLoCo`.
    """

    def __init__(
        self,
        manager: object,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec = "chunktopk:k=64,chunk=4096 | codebook:bits=2",
        *,
        sync_every: int,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        exchange: str = "gather",
        seed: int = 0,
    ) -> None:
        compression = DriftCompression(compressor, Residual(decay), exchange, "raise")
        outer = OuterSGD(outer_lr)
        ElasticOuterLoop.__init__(
            self, manager, model, optimizer, compression, outer, sync_every, seed
        )
