"""What takes part in a benchmark: a method of ours by its spec, or a baseline by its name."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from laconic.bench.baselines import BASELINES
from laconic.bench.case import Case, Mounted, Traffic
from laconic.bench.local_case import LocalCase
from laconic.bench.options import pieces, read_options
from laconic.errors import ConfigError
from laconic.lanes import NanPolicy
from laconic.mount.ddp import Link, attach
from laconic.plan import make_plan
from laconic.spec import from_settings, read_settings


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

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        link = attach(
            ddp,
            self.spec,
            memory=self._memory(),
            exchange=self.exchange,
            nan_policy=self.nan_policy,
            checksum=self.checksum,
            seed=seed,
        )
        return _LaconicAtWork(optimizer, link)

    def _memory(self) -> str | None:
        return None if self.memory == "auto" else self.memory


@dataclass(frozen=True)
class _LaconicAtWork(Mounted):
    link: Link

    def traffic(self, steps: int) -> Traffic:
        stats = self.link.stats()
        return Traffic(
            sent_bytes=_number(stats["sent_bytes"]),
            encode_s=_number(stats["encode_s"]),
            wire_s=_number(stats["wire_s"]),
            decode_s=_number(stats["decode_s"]),
            backend=str(stats["backend"]),
        )

    def close(self) -> None:
        self.link.detach()


def parse_case(text: str) -> Case:
    """The case that `text` names; raises before anything is started."""
    name = text.partition(":")[0].strip()
    if name in BASELINES:
        return from_settings(name, BASELINES[name], read_settings(text)[1])
    if name.startswith(("ddp-", "torch-")):
        raise ConfigError(f"no baseline named {name!r}; there are {', '.join(BASELINES)}")
    spec, _, options = text.partition("@")
    if "local" in (given := read_options(options)):
        return from_settings(text, LocalCase, given, spec=spec.strip())
    return _laconic(text)


def _laconic(text: str) -> Laconic:
    """`topk:ratio=0.01 @ memory=none, exchange=gather` and the like."""
    spec, _, options = text.partition("@")
    return from_settings(text, Laconic, read_options(options), spec=spec.strip())


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


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
