"""Parses a case: one of our methods by its spec, or a baseline by its name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.bench.case import Case, Change, Mounted, Traffic
from gradwire.bench.cases.baselines import BASELINES
from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.options import pieces, read_options
from gradwire.control.accordion import Accordion
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import Link, attach
from gradwire.spec import find_layers, from_settings, read_settings


@dataclass(frozen=True)
class Gradwire(Case):
    """A method of ours, and what `attach` is told beside it."""

    spec: str
    memory: str = "auto"
    exchange: str = "auto"
    nan_policy: NanPolicy = "propagate"
    checksum: bool = False
    controller: str = "none"
    least_bytes: str = "auto"

    def __post_init__(self) -> None:
        layers = None if self.exchange == "auto" else find_layers(self.exchange)
        size = 2 if layers is None else 2 * layers.node
        plan = make_plan(self.spec, self._memory(), self.exchange, (), size)
        if (rule := self.rule()) is not None:
            rule.pilot(plan.compressor, [], size)
        self._least_bytes()

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        link = attach(
            ddp,
            self.spec,
            memory=self._memory(),
            exchange=self.exchange,
            nan_policy=self.nan_policy,
            checksum=self.checksum,
            controller=self.rule(),
            least_bytes=self._least_bytes(),
            seed=seed,
        )
        return _GradwireAtWork(optimizer, link)

    def rule(self) -> Controller | None:
        """Who changes settings on the way."""
        rule = None if self.controller == "none" else find_controller(self.controller)
        if isinstance(rule, Accordion) and rule.passes()["high"] > 1:
            raise ConfigError(f"{self.controller}: the benchmarks' loops accumulate nothing")
        return rule

    def _memory(self) -> str | None:
        return None if self.memory == "auto" else self.memory

    def _least_bytes(self) -> int | None:
        if self.least_bytes == "auto":
            return None
        if not self.least_bytes.isdecimal():
            raise ConfigError(
                f"{self.spec}: least_bytes must be auto or a whole number, got {self.least_bytes!r}"
            )
        return int(self.least_bytes)


@dataclass(frozen=True)
class _GradwireAtWork(Mounted):
    link: Link

    def traffic(self, steps: int) -> Traffic:
        stats = self.link.stats()
        return Traffic(
            sent_bytes=_number(stats["sent_bytes"]),
            encode_s=_number(stats["encode_s"]),
            wire_s=_number(stats["wire_s"]),
            decode_s=_number(stats["decode_s"]),
            backend=str(stats["backend"]),
            timeline=timeline_of(stats),
        )

    def epoch_ended(self, learning_rate: float) -> None:
        self.link.epoch_ended(learning_rate)

    def close(self) -> None:
        self.link.detach()


def is_baseline(text: str) -> bool:
    """Whether a case is somebody else's, by name."""
    return _name(text) in BASELINES


def parse_case(text: str) -> Case:
    """The case that `text` names; raises before anything is started."""
    name = _name(text)
    if name in BASELINES:
        return from_settings(name, BASELINES[name], read_settings(text)[1])
    if name.startswith(("ddp-", "torch-")):
        raise ConfigError(f"no baseline named {name!r}; there are {', '.join(BASELINES)}")
    spec, _, options = text.partition("@")
    if "local" in (given := read_options(options)):
        return from_settings(text, LocalCase, given, spec=spec.strip())
    return _gradwire(text)


def _name(text: str) -> str:
    return text.partition(":")[0].strip()


def _gradwire(text: str) -> Gradwire:
    """`topk:ratio=0.01 @ memory=none, controller=(gravac:low=10,high=1000)` and the like."""
    spec, _, options = text.partition("@")
    return from_settings(text, Gradwire, read_options(options), spec=spec.strip())


def split_cases(texts: Iterable[str]) -> tuple[str, ...]:
    """The cases in "a,b:x=1,y=2,c" and the like, checked; `y=2` still belongs to `b`.

    Commas in brackets separate nothing.
    """
    cases: list[str] = []
    for text in texts:
        for index, piece in enumerate(pieces(text)):
            goes_on = index > 0 and "=" in piece.partition(":")[0].partition("@")[0]
            cases[-1:] = [f"{cases[-1]},{piece}"] if goes_on else [*cases[-1:], piece]
    cases = [case.strip() for case in cases]
    for case in cases:
        parse_case(case)
    if twice := sorted({case for case in cases if cases.count(case) > 1}):
        raise ConfigError(f"cases: {twice} given more than once")
    if not cases:
        raise ConfigError("cases: expected at least one")
    return tuple(cases)


def timeline_of(stats: Mapping[str, object]) -> tuple[Change, ...]:
    """What a controller has decided, as statistics tell it; nothing where there is none."""
    told = stats.get("controller")
    rows = told["decisions"] if isinstance(told, Mapping) else []
    return tuple(Change(**row) for row in rows)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
