"""Cases of decentralised methods: `topk:ratio=0.01 @ local=(choco:topology=ring,gamma=0.1)`."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.bench.cases.local_settings import LocalSettings, SyncSchedule, WorkerContext
from gradwire.comm.cost_model import Kind
from gradwire.decentralized import BEER, CGT, DSGD, ChocoSGD, Mixing
from gradwire.decentralized.topology import topology_of
from gradwire.errors import ConfigError
from gradwire.local.base import LocalMethod


@dataclass(frozen=True, kw_only=True)
class _Neighbors(LocalSettings):
    """Settings of methods whose workers exchange messages with their neighbors alone."""

    sync_every: int = 1
    topology: str = "ring"
    kind: ClassVar[Kind] = "neighbors"

    def senders(self, workers: int) -> int:
        mixing = Mixing(topology_of(self.topology), workers)
        return 1 + round(max(mixing.mean_degree(rank) for rank in range(workers)))

    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.sync_every)

    def check_exchange(self, method: str, exchange: str) -> None:
        if exchange != "auto":
            raise ConfigError(
                f"{method}: sends to neighbors, so exchange must be auto, got {exchange!r}"
            )


@dataclass(frozen=True, kw_only=True)
class DsgdSettings(_Neighbors):
    """Settings of DSGD, which sends parameters as they are."""

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        self.check_exchange("dsgd", exchange)
        if spec != "none":
            raise ConfigError(
                f"dsgd: sends parameters uncompressed, so the method must be none, got {spec}"
            )
        model, optimizer, group, seed = worker
        return DSGD(model, optimizer, process_group=group, seed=seed, **vars(self))


@dataclass(frozen=True, kw_only=True)
class ChocoSettings(_Neighbors):
    """Settings of CHOCO-SGD; the case's method compresses differences of parameters."""

    gamma: float

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        self.check_exchange("choco", exchange)
        model, optimizer, group, seed = worker
        return ChocoSGD(model, optimizer, spec, process_group=group, seed=seed, **vars(self))


@dataclass(frozen=True, kw_only=True)
class _Tracking(_Neighbors):
    """Settings of methods that exchange parameters and tracked gradients at every step."""

    gamma: float
    messages: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.sync_every != 1:
            raise ConfigError(
                f"gradient tracking: sync_every must be 1, got {self.sync_every}: gradients are "
                "tracked at every step"
            )


@dataclass(frozen=True, kw_only=True)
class CgtSettings(_Tracking):
    """Settings of C-GT; the case's method compresses both messages."""

    alpha: float = 1.0

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        self.check_exchange("cgt", exchange)
        model, optimizer, group, seed = worker
        return CGT(
            model,
            optimizer,
            spec,
            gamma=self.gamma,
            alpha=self.alpha,
            topology=self.topology,
            process_group=group,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class BeerSettings(_Tracking):
    """Settings of BEER; the case's method compresses both messages."""

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        self.check_exchange("beer", exchange)
        model, optimizer, group, seed = worker
        return BEER(
            model,
            optimizer,
            spec,
            gamma=self.gamma,
            topology=self.topology,
            process_group=group,
            seed=seed,
        )
