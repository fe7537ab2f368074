"""Parses a case: a method of this package by its spec, or a baseline by its name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from gradwire.attacks import Attack, attack_of
from gradwire.auto.auto import Auto, check_alone, find_auto
from gradwire.bench.case import Case, Change, Mounted, Traffic
from gradwire.bench.cases.baselines import BASELINES
from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.update_side import (
    Side,
    compressed_optimiser,
    demo_method,
    demo_optimiser,
    set_beta1,
)
from gradwire.checks import check_fraction_below_one, check_whole
from gradwire.control.accordion import Accordion
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import Link, attach
from gradwire.integrations.settings import Settings
from gradwire.optim.base import update_plan
from gradwire.options import read_options, split_commas
from gradwire.spec import from_settings, parse_exchange, read_settings


@dataclass(frozen=True)
class MethodCase(Case):
    """A method of this package, with the settings of `attach`."""

    spec: str
    memory: str = "auto"
    exchange: str = "auto"
    nan_policy: NanPolicy = "propagate"
    checksum: bool = False
    controller: str = "none"
    least_bytes: str = "auto"
    chunk_bytes: str = "auto"
    side: Side = "gradient"
    drop_momentum: bool = False
    """True if the optimiser loses its momentum, for a memory that has one of its own."""
    beta1: str = "auto"
    """Replaces the decay of the optimiser's running mean of gradients, unless it is auto."""
    attack: str = "none"
    """Sent by the last `liars` workers of a simulation in place of their gradients."""
    liars: int = 0

    def __post_init__(self) -> None:
        self.first_beta()
        self.attacks(self.liars + 1)
        if self.auto() is not None:
            check_alone(self._memory(), self.exchange, self.make_controller())
            self._lengths()
            return
        size = 2
        if self.exchange != "auto":
            config = parse_exchange(self.exchange)
            size = max(2 * (config.node or 1), config.least_ranks)
        plan = make_plan(self.spec, self._memory(), self.exchange, (), size)
        if (controller := self.make_controller()) is not None:
            controller.create_state(plan.compressor, [], size)
        self._lengths()
        if self.side == "gradient":
            return
        side = f"side={self.side}"
        if self.drop_momentum:
            raise ConfigError(f"{self.spec}: {side} sends momentum; omit drop_momentum")
        if controller is not None:
            raise ConfigError(f"{self.spec}: a controller measures gradients, not {side}")
        update_plan(side, plan, ())
        if self.side == "demo":
            demo_method(self.spec, plan)

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        if self.liars:
            raise ConfigError(f"{self.spec}: attack={self.attack} needs simulated workers")
        least_bytes, chunk_bytes = self._lengths()
        settings = Settings(
            self.spec,
            memory=self._memory(),
            exchange=self.exchange,
            nan_policy=self.nan_policy,
            checksum=self.checksum,
            controller=self.make_controller(),
            least_bytes=least_bytes,
            chunk_bytes=chunk_bytes,
            seed=seed,
        )
        if self.drop_momentum:
            remove_momentum(optimizer)
        if (beta1 := self.first_beta()) is not None:
            set_beta1(optimizer, beta1)
        if self.side == "gradient":
            known = None if self.auto() is None else optimizer
            return _MountedMethod(optimizer, attach(ddp, settings, optimizer=known))
        if self.side == "demo":
            plan = make_plan(self.spec, self._memory(), self.exchange, (), 2)
            method = demo_method(self.spec, plan)
            demo = demo_optimiser(ddp, optimizer, method, seed)
            return _MountedMethod(demo, demo.link, clips=False)
        compressed = compressed_optimiser(ddp, optimizer, settings)
        return _MountedMethod(compressed, compressed.link, clips=False)

    def auto(self) -> Auto | None:
        """Returns the configuration of the automatic mode, or None."""
        return find_auto(self.spec)

    def first_beta(self) -> float | None:
        """Returns the decay that the case sets, or None."""
        if self.beta1 == "auto":
            return None
        try:
            beta1 = float(self.beta1)
        except ValueError:
            raise ConfigError(
                f"{self.spec}: beta1 must be auto or a number, got {self.beta1!r}"
            ) from None
        check_fraction_below_one(self.spec, "beta1", beta1)
        return beta1

    def attacks(self, workers: int) -> dict[int, Attack]:
        """Returns the attacks of the last workers by rank; empty if all are honest."""
        check_whole(self.spec, "liars", self.liars, 0)
        if (self.attack == "none") != (self.liars == 0):
            raise ConfigError(
                f"{self.spec}: attack and liars go together, got attack={self.attack}, "
                f"liars={self.liars}"
            )
        if not self.liars:
            return {}
        if self.liars >= workers:
            raise ConfigError(f"{self.spec}: {self.liars} liars leave none of {workers} workers")
        attack = attack_of(self.attack)
        return dict.fromkeys(range(workers - self.liars, workers), attack)

    def make_controller(self) -> Controller | None:
        """Builds the controller that changes settings during training, or None."""
        controller = None if self.controller == "none" else find_controller(self.controller)
        if isinstance(controller, Accordion) and controller.passes()["high"] > 1:
            raise ConfigError(f"{self.controller}: the benchmarks do not accumulate gradients")
        return controller

    def _memory(self) -> str | None:
        return None if self.memory == "auto" else self.memory

    def _lengths(self) -> tuple[int | None, int | None]:
        """Returns `least_bytes` and `chunk_bytes`, None where they are auto."""
        found: list[int | None] = []
        for name, text in (("least_bytes", self.least_bytes), ("chunk_bytes", self.chunk_bytes)):
            if text != "auto" and not text.isdecimal():
                raise ConfigError(
                    f"{self.spec}: {name} must be auto or a whole number, got {text!r}"
                )
            found.append(None if text == "auto" else int(text))
        least_bytes, chunk_bytes = found
        return least_bytes, chunk_bytes


@dataclass(frozen=True)
class _MountedMethod(Mounted):
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
            received_bytes=_number(stats["received_bytes"]),
        )

    def epoch_ended(self, learning_rate: float) -> None:
        self.link.epoch_ended(learning_rate)

    def close(self) -> None:
        self.link.detach()


def remove_momentum(optimizer: Optimizer) -> None:
    """Makes an SGD plain SGD; raises ConfigError for another optimiser."""
    if not isinstance(optimizer, SGD):
        name = type(optimizer).__name__
        raise ConfigError(f"drop_momentum: only SGD has a momentum to drop, got {name}")
    for group in optimizer.param_groups:
        group.update(momentum=0.0, nesterov=False)


def drops_momentum(text: str) -> bool:
    """Returns whether a case is trained without the momentum of the workload's optimiser."""
    case = parse_case(text)
    return isinstance(case, MethodCase) and case.drop_momentum


def side_of(text: str) -> Side:
    """Returns what the workers of a case exchange."""
    case = parse_case(text)
    return case.side if isinstance(case, MethodCase) else "gradient"


def beta1_of(text: str) -> float | None:
    """Returns the decay of the running mean of gradients that a case sets, if it does."""
    case = parse_case(text)
    return case.first_beta() if isinstance(case, MethodCase) else None


def attacks_of(text: str, workers: int) -> dict[int, Attack]:
    """Returns the attacks of a case by rank; empty if all workers are honest."""
    case = parse_case(text)
    return case.attacks(workers) if isinstance(case, MethodCase) else {}


def is_baseline(text: str) -> bool:
    """Returns whether a case names a baseline."""
    return _name(text) in BASELINES


def parse_case(text: str) -> Case:
    """Parses a case; raises ConfigError for an invalid one, before any worker starts."""
    name = _name(text)
    if name in BASELINES:
        return from_settings(name, BASELINES[name], read_settings(text)[1])
    if name.startswith(("ddp-", "torch-")):
        raise ConfigError(f"no baseline named {name!r}; there are {', '.join(BASELINES)}")
    spec, _, options = text.partition("@")
    if "local" in (given := read_options(options)):
        return from_settings(text, LocalCase, given, spec=spec.strip())
    return _method_case(text)


def _name(text: str) -> str:
    return text.partition(":")[0].strip()


def _method_case(text: str) -> MethodCase:
    """Parses text such as `topk:ratio=0.01 @ memory=none, controller=(gravac:low=10,high=1000)`."""
    spec, _, options = text.partition("@")
    return from_settings(text, MethodCase, read_options(options), spec=spec.strip())


def split_cases(texts: Iterable[str]) -> tuple[str, ...]:
    """Splits and checks cases such as "a,b:x=1,y=2,c", where `y=2` belongs to `b`.

    Commas in brackets do not separate cases.
    """
    cases: list[str] = []
    for text in texts:
        for index, piece in enumerate(split_commas(text)):
            continues = index > 0 and "=" in piece.partition(":")[0].partition("@")[0]
            cases[-1:] = [f"{cases[-1]},{piece}"] if continues else [*cases[-1:], piece]
    cases = [case.strip() for case in cases]
    for case in cases:
        parse_case(case)
    if twice := sorted({case for case in cases if cases.count(case) > 1}):
        raise ConfigError(f"cases: {twice} given more than once")
    if not cases:
        raise ConfigError("cases: expected at least one")
    return tuple(cases)


def timeline_of(stats: Mapping[str, object]) -> tuple[Change, ...]:
    """Returns the decisions in the statistics of a controller; empty without one."""
    controller = stats.get("controller")
    rows = controller["decisions"] if isinstance(controller, Mapping) else []
    return tuple(Change(**row) for row in rows)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
