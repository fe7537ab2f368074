"""Cases that synchronise rarely: local methods, from text such as `qsparse:sync_every=8`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from gradwire.bench.case import Case, Mounted, Traffic
from gradwire.bench.cases.options import read_options
from gradwire.errors import ConfigError
from gradwire.local import CSER, BlockCSER, DiLoCo, LocalSGD, QsparseLocalSGD, SparseLoCo
from gradwire.local.base import LocalSteps
from gradwire.local.workers import Group, simulated
from gradwire.spec import from_settings


class Around(NamedTuple):
    """What a local method goes around: one worker's model and optimiser, and who it talks to."""

    model: nn.Module
    optimizer: Optimizer
    group: Group
    seed: int


class Rhythm(NamedTuple):
    """Something is told every `gap` steps, and heard `delay` steps later."""

    gap: int
    delay: int = 0


@dataclass(frozen=True)
class Local(ABC):
    """A local method's settings; with a compressor's spec and an exchange it can be built."""

    sync_every: int

    @abstractmethod
    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps: ...

    @abstractmethod
    def rhythm(self) -> Rhythm: ...


@dataclass(frozen=True)
class _Whole(Local):
    """What methods share that tell of the whole model."""

    delay: int = 0
    ahead: float = 1.0

    def rhythm(self) -> Rhythm:
        return Rhythm(self.sync_every, self.delay)


@dataclass(frozen=True)
class _Plain(_Whole):
    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        if (spec, exchange) != ("none", "auto"):
            raise ConfigError(f"local_sgd: tells all there is, so the method is none, got {spec}")
        model, optimizer, group, seed = around
        return LocalSGD(model, optimizer, process_group=group, seed=seed, **vars(self))


@dataclass(frozen=True)
class _Qsparse(_Whole):
    memory: str = "residual"

    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        model, optimizer, group, seed = around
        return QsparseLocalSGD(
            model, optimizer, spec, exchange=exchange, process_group=group, seed=seed, **vars(self)
        )


@dataclass(frozen=True)
class _TwoWays(Local):
    """The case's own method is for updates, which are told at every step, this one for errors."""

    errors: str

    def rhythm(self) -> Rhythm:
        return Rhythm(1)


@dataclass(frozen=True)
class _Cser(_TwoWays):
    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        model, optimizer, group, seed = around
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
class _BlockCser(_TwoWays):
    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        if exchange != "auto":
            raise ConfigError(f"block_cser: takes a mean, so exchange is auto, got {exchange!r}")
        model, optimizer, group, seed = around
        every = self.sync_every
        return BlockCSER(
            model, optimizer, spec, self.errors, sync_every=every, process_group=group, seed=seed
        )


@dataclass(frozen=True)
class _Outward(Local):
    """What methods with an outer step and a division of the model share."""

    fragments: int = 1
    delay: int = 0

    def rhythm(self) -> Rhythm:
        return Rhythm(self.sync_every // self.fragments, self.delay)


@dataclass(frozen=True)
class _DiLoCo(_Outward):
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        model, optimizer, group, seed = around
        return DiLoCo(
            model, optimizer, spec, exchange=exchange, process_group=group, seed=seed, **vars(self)
        )


@dataclass(frozen=True)
class _SparseLoCo(_Outward):
    outer_lr: float = 1.0
    decay: float = 0.95

    def build(self, spec: str, exchange: str, around: Around) -> LocalSteps:
        model, optimizer, group, seed = around
        # Its own default is not to choose: all workers hear what each has said.
        way = "gather" if exchange == "auto" else exchange
        return SparseLoCo(
            model, optimizer, spec, exchange=way, process_group=group, seed=seed, **vars(self)
        )


LOCAL: Mapping[str, type[Local]] = {
    "local_sgd": _Plain,
    "qsparse": _Qsparse,
    "cser": _Cser,
    "block_cser": _BlockCser,
    "diloco": _DiLoCo,
    "sparseloco": _SparseLoCo,
}


def parse_local(text: str) -> Local:
    """The settings that "name:sync_every=8,errors=(grbs:ratio=0.25,block=64)" and so on names."""
    name, _, options = (part.strip() for part in text.partition(":"))
    if name not in LOCAL:
        close = get_close_matches(name, LOCAL, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(LOCAL)}"
        raise ConfigError(f"no local method named {name!r}; {hint}")
    return from_settings(name, LOCAL[name], read_options(options))


_MANY_LAYERS = 64
"""More than anybody divides a model into."""


@dataclass(frozen=True)
class LocalCase(Case):
    """`topk:ratio=0.01 @ local=(qsparse:sync_every=8)`: a method of ours inside a local one."""

    spec: str
    local: str
    exchange: str = "auto"

    def __post_init__(self) -> None:
        # What cannot go together refuses here, and not on every host.
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(_MANY_LAYERS)))
        self.build(Around(model, SGD(model.parameters(), lr=0.1), simulated(2)[0], 0))

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        held = ExitStack()
        held.enter_context(ddp.no_sync())
        steps = self.build(Around(ddp.module, optimizer, ddp.process_group, seed))
        held.enter_context(steps)
        return _AtWork(
            optimizer,
            steps,
            held,
            averaged=steps.averaged,
            period=parse_local(self.local).sync_every,
            rest=self.rhythm().delay,
        )

    def build(self, around: Around) -> LocalSteps:
        """The local method around one worker's optimiser."""
        return parse_local(self.local).build(self.spec, self.exchange, around)

    def rhythm(self) -> Rhythm:
        """How often workers talk, and how late they listen."""
        return parse_local(self.local).rhythm()


@dataclass(frozen=True)
class _AtWork(Mounted):
    steps: LocalSteps
    held: ExitStack

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
        """Local methods know no epochs."""

    def close(self) -> None:
        self.held.close()
