"""What takes part in a benchmark: a method of ours by its spec, or a baseline by its name.

Baselines do not count their bytes, so they get the bytes of a ring all-reduce of what they send,
which is what gloo does and what the interface counters confirm.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.bench.records import BASELINE
from laconic.comm.meter import ring_bytes
from laconic.errors import ConfigError
from laconic.lanes import NanPolicy
from laconic.mount.ddp import Link, attach
from laconic.plan import make_plan
from laconic.spec import from_settings, read_settings

_POWERSGD_START = 2  # the smallest that torch allows


class Traffic(NamedTuple):
    """What one worker has sent since it mounted the case; seconds are None where nobody counts."""

    sent_bytes: float
    encode_s: float | None = None
    wire_s: float | None = None
    decode_s: float | None = None


class Mounted(ABC):
    """A case at work on one DDP model."""

    @abstractmethod
    def traffic(self, steps: int) -> Traffic:
        """What the `steps` taken so far have cost."""

    @abstractmethod
    def close(self) -> None: ...


class Case(ABC):
    """A way for the gradients of a DDP model to become their mean."""

    one_bucket: ClassVar[bool] = False

    @abstractmethod
    def mount(self, ddp: DDP, seed: int) -> Mounted: ...


@dataclass(frozen=True)
class _Ring(Mounted):
    """An all-reduce of the same number of bytes in every step."""

    step_bytes: float

    def traffic(self, steps: int) -> Traffic:
        return Traffic(steps * self.step_bytes)

    def close(self) -> None:
        return


@dataclass(frozen=True)
class DdpFp32(Case):
    """DDP as it is without a hook."""

    def mount(self, ddp: DDP, seed: int) -> Mounted:
        return _Ring(dense_bytes(ddp))


@dataclass(frozen=True)
class TorchFp16(Case):
    """torch's own half-precision hook."""

    def mount(self, ddp: DDP, seed: int) -> Mounted:
        ddp.register_comm_hook(ddp.process_group, fp16_compress_hook)
        return _Ring(dense_bytes(ddp) / 2)


@dataclass(frozen=True)
class TorchPowerSgd(Case):
    """torch's own PowerSGD hook; its first steps are dense.

    It starts collectives inside callbacks of others. With several buckets gloo then aborts or
    hangs, so it gets its best case: all gradients in one bucket.
    """

    rank: int
    one_bucket: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"torch-powersgd: rank must be at least 1, got {self.rank}")

    def mount(self, ddp: DDP, seed: int) -> Mounted:
        state = PowerSGDState(
            process_group=ddp.process_group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=_POWERSGD_START,
            random_seed=seed,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        return _TorchPowerSgdAtWork(state, ddp.process_group.size(), dense_bytes(ddp))


@dataclass(frozen=True)
class _TorchPowerSgdAtWork(Mounted):
    state: PowerSGDState
    workers: int
    dense_bytes: float

    def traffic(self, steps: int) -> Traffic:
        said_bytes = 4 * int(self.state.total_numel_after_compression)
        dense_steps = min(steps, _POWERSGD_START)
        return Traffic(ring_bytes(said_bytes, self.workers) + dense_steps * self.dense_bytes)

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Laconic(Case):
    """A method of ours, and what `attach` is told beside it."""

    spec: str
    memory: str = "auto"
    exchange: str = "auto"
    nan_policy: NanPolicy = "propagate"
    checksum: bool = False

    def __post_init__(self) -> None:
        make_plan(self.spec, self._memory(), self.exchange, (), 2)

    def mount(self, ddp: DDP, seed: int) -> Mounted:
        link = attach(
            ddp,
            self.spec,
            memory=self._memory(),
            exchange=self.exchange,
            nan_policy=self.nan_policy,
            checksum=self.checksum,
            seed=seed,
        )
        return _LaconicAtWork(link)

    def _memory(self) -> str | None:
        return None if self.memory == "auto" else self.memory


@dataclass(frozen=True)
class _LaconicAtWork(Mounted):
    link: Link

    def traffic(self, steps: int) -> Traffic:
        stats = self.link.stats()
        return Traffic(*(_number(stats[field]) for field in Traffic._fields))

    def close(self) -> None:
        self.link.detach()


BASELINES: Mapping[str, type[Case]] = {
    BASELINE: DdpFp32,
    "torch-fp16": TorchFp16,
    "torch-powersgd": TorchPowerSgd,
}


def dense_bytes(ddp: DDP) -> float:
    """What one worker sends for all gradients as they are."""
    grad_bytes = sum(p.nbytes for p in ddp.parameters() if p.requires_grad)
    return ring_bytes(grad_bytes, ddp.process_group.size())


def parse_case(text: str) -> Case:
    """The case that `text` names; raises before anything is started."""
    name = text.partition(":")[0].strip()
    if name in BASELINES:
        return from_settings(name, BASELINES[name], read_settings(text)[1])
    if name.startswith(("ddp-", "torch-")):
        raise ConfigError(f"no baseline named {name!r}; there are {', '.join(BASELINES)}")
    return _laconic(text)


def _laconic(text: str) -> Laconic:
    """`topk:ratio=0.01 @ memory=none, exchange=gather` and the like."""
    spec, _, options = text.partition("@")
    pairs = [option.partition("=") for option in options.split(",")] if options.strip() else []
    given = {key.strip(): value.strip() for key, _, value in pairs}
    return from_settings(text, Laconic, given, spec=spec.strip())


def split_cases(texts: Iterable[str]) -> tuple[str, ...]:
    """The cases in "a,b:x=1,y=2,c" and the like, checked; `y=2` still belongs to `b`."""
    cases: list[str] = []
    for text in texts:
        for index, piece in enumerate(text.split(",")):
            goes_on = index > 0 and "=" in piece.partition(":")[0]
            cases[-1:] = [f"{cases[-1]},{piece}"] if goes_on else [*cases[-1:], piece]
    cases = [case.strip() for case in cases]
    for case in cases:
        parse_case(case)
    if twice := sorted({case for case in cases if cases.count(case) > 1}):
        raise ConfigError(f"cases: {twice} given more than once")
    if not cases:
        raise ConfigError("cases: expected at least one")
    return tuple(cases)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
