"""Cases of local methods, which synchronise rarely, from text such as `qsparse:sync_every=8`."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from gradwire.bench.case import Case, Mounted, Traffic
from gradwire.bench.cases.local_settings import LocalSettings, SyncSchedule, WorkerContext
from gradwire.bench.cases.neighbors import BeerSettings, CgtSettings, ChocoSettings, DsgdSettings
from gradwire.bench.cases.two_optimisers import MuonAndAdamW
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
from gradwire.local.anchors import Anchors
from gradwire.local.base import LocalMethod
from gradwire.local.workers import simulated
from gradwire.options import read_options
from gradwire.spec import from_settings


@dataclass(frozen=True)
class _WholeModel(LocalSettings):
    """Settings of methods that synchronise the whole model at once."""

    delay: int = 0
    ahead: float = 1.0

    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.sync_every, self.delay)


@dataclass(frozen=True)
class _LocalSgd(_WholeModel):
    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        if (spec, exchange) != ("none", "auto"):
            raise ConfigError(
                f"local_sgd: sends parameters uncompressed, so the method must be none, got {spec}"
            )
        model, optimizer, group, seed = worker
        return LocalSGD(model, optimizer, process_group=group, seed=seed, **vars(self))


@dataclass(frozen=True)
class _Qsparse(_WholeModel):
    memory: str = "residual"

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        model, optimizer, group, seed = worker
        return QsparseLocalSGD(
            model, optimizer, spec, exchange=exchange, process_group=group, seed=seed, **vars(self)
        )


@dataclass(frozen=True)
class _AsyncQsparse(LocalSettings):
    """Settings of asynchronous Qsparse, whose workers sync with a server at their own times."""

    gaps: Literal["fixed", "random"] = "fixed"

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        if exchange != "auto":
            raise ConfigError(
                f"async_qsparse: sends to a server, so exchange must be auto, got {exchange!r}"
            )
        model, optimizer, group, seed = worker
        return AsyncQsparseLocalSGD(
            model,
            optimizer,
            spec,
            sync_every=self.sync_every,
            gaps=self.gaps,
            process_group=group,
            seed=seed,
        )

    def sync_schedule(self) -> SyncSchedule:
        """Returns the mean interval: random gaps are uniform from 1 to `sync_every`."""
        return SyncSchedule(self.sync_every if self.gaps == "fixed" else (1 + self.sync_every) // 2)


@dataclass(frozen=True)
class _UpdatesAndErrors(LocalSettings):
    """Settings of CSER: the case's method compresses the updates, which are sent at every step.

    `errors` is the method for the errors.
    """

    errors: str

    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(1)


@dataclass(frozen=True)
class _Cser(_UpdatesAndErrors):
    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        model, optimizer, group, seed = worker
        return CSER(
            model,
            optimizer,
            spec,
            self.errors,
            sync_every=self.sync_every,
            exchange=exchange,
            process_group=group,
            seed=seed,
        )


@dataclass(frozen=True)
class _BlockCser(_UpdatesAndErrors):
    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        if exchange != "auto":
            raise ConfigError(
                f"block_cser: uses a mean, so exchange must be auto, got {exchange!r}"
            )
        model, optimizer, group, seed = worker
        sync_every = self.sync_every
        return BlockCSER(
            model,
            optimizer,
            spec,
            self.errors,
            sync_every=sync_every,
            process_group=group,
            seed=seed,
        )


@dataclass(frozen=True)
class _OuterLoop(LocalSettings):
    """Settings of methods with an outer optimiser and a model in fragments."""

    fragments: int = 1
    delay: int = 0
    anchors: Anchors = "device"

    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.sync_every // self.fragments, self.delay)


@dataclass(frozen=True)
class _DiLoCo(_OuterLoop):
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        model, optimizer, group, seed = worker
        return DiLoCo(
            model, optimizer, spec, exchange=exchange, process_group=group, seed=seed, **vars(self)
        )


@dataclass(frozen=True)
class _MuLoCo(_OuterLoop):
    """Settings of MuLoCo, whose local steps are those of Muon and AdamW."""

    outer_lr: float = 0.8
    outer_momentum: float = 0.9
    decay: float = 0.9

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        model, optimizer, group, seed = worker
        return MuLoCo(
            model, optimizer, spec, exchange=exchange, process_group=group, seed=seed, **vars(self)
        )

    def optimiser(self, model: nn.Module, own: Optimizer) -> Optimizer:
        return MuonAndAdamW(model, own)


@dataclass(frozen=True)
class _SparseLoCo(_OuterLoop):
    outer_lr: float = 1.0
    decay: float = 0.95

    def build(self, spec: str, exchange: str, worker: WorkerContext) -> LocalMethod:
        model, optimizer, group, seed = worker
        # As in the records of earlier runs; the studies of language models name the default.
        resolved = "gather" if exchange == "auto" else exchange
        return SparseLoCo(
            model, optimizer, spec, exchange=resolved, process_group=group, seed=seed, **vars(self)
        )


LOCAL_METHODS: Mapping[str, type[LocalSettings]] = {
    "local_sgd": _LocalSgd,
    "qsparse": _Qsparse,
    "async_qsparse": _AsyncQsparse,
    "cser": _Cser,
    "block_cser": _BlockCser,
    "diloco": _DiLoCo,
    "muloco": _MuLoCo,
    "sparseloco": _SparseLoCo,
    "dsgd": DsgdSettings,
    "choco": ChocoSettings,
    "cgt": CgtSettings,
    "beer": BeerSettings,
}


def parse_local(text: str) -> LocalSettings:
    """Parses settings such as "cser:sync_every=8,errors=(grbs:ratio=0.25,block=64)"."""
    name, _, options = (part.strip() for part in text.partition(":"))
    if name not in LOCAL_METHODS:
        close = get_close_matches(name, LOCAL_METHODS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(LOCAL_METHODS)}"
        raise ConfigError(f"no local method named {name!r}; {hint}")
    return from_settings(name, LOCAL_METHODS[name], read_options(options))


_MANY_LAYERS = 64
"""More than the largest sensible number of fragments."""


@dataclass(frozen=True)
class LocalCase(Case):
    """A compressor inside a local method: `topk:ratio=0.01 @ local=(qsparse:sync_every=8)`."""

    spec: str
    local: str
    exchange: str = "auto"

    def __post_init__(self) -> None:
        # Incompatible settings are refused here, before workers start.
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(_MANY_LAYERS)))
        self.build(WorkerContext(model, SGD(model.parameters(), lr=0.1), simulated(2)[0], 0))

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        contexts = ExitStack()
        contexts.enter_context(ddp.no_sync())
        optimizer = self.optimiser(ddp.module, optimizer)
        steps = self.build(WorkerContext(ddp.module, optimizer, ddp.process_group, seed))
        contexts.enter_context(steps)
        return _MountedLocal(
            optimizer,
            steps,
            contexts,
            in_backward=False,
            averaged=steps.averaged,
            period=parse_local(self.local).sync_every,
            idle_offset=self.sync_schedule().delay,
        )

    def optimiser(self, model: nn.Module, own: Optimizer) -> Optimizer:
        """Returns the optimiser of a worker's local steps, in place of the workload's own."""
        return parse_local(self.local).optimiser(model, own)

    def build(self, worker: WorkerContext) -> LocalMethod:
        """Builds the local method for one worker."""
        return parse_local(self.local).build(self.spec, self.exchange, worker)

    def sync_schedule(self) -> SyncSchedule:
        """Returns the interval and the delay of synchronisation."""
        return self.settings().sync_schedule()

    def settings(self) -> LocalSettings:
        """Returns the parsed settings of the local method."""
        return parse_local(self.local)


@dataclass(frozen=True)
class _MountedLocal(Mounted):
    steps: LocalMethod
    contexts: ExitStack

    def traffic(self, steps: int) -> Traffic:
        stats = self.steps.stats()
        return Traffic(
            sent_bytes=float(cast(int, stats["sent_bytes"])),
            encode_s=cast(float, stats["encode_s"]),
            wire_s=cast(float, stats["wire_s"]),
            decode_s=cast(float, stats["decode_s"]),
            backend=str(stats["backend"]),
        )

    def epoch_ended(self, learning_rate: float) -> None:
        """Does nothing: local methods do not use epochs."""

    def close(self) -> None:
        self.contexts.close()
