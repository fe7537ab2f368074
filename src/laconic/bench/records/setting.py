"""Which runs may be compared: those with the same work, workers and links."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from laconic.bench import human
from laconic.bench.records.kinds import KernelRecord, StepRecord, TrainRecord

R = TypeVar("R")
K = TypeVar("K")


class Links(NamedTuple):
    """How the workers were joined; the rate only holds if the links were shaped to it."""

    workers: int
    rate: str | None
    shaped: bool

    def words(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        return f"{workers}, {links_words(self)}"


def links_words(links: Links) -> str:
    """Their rate, whoever they join."""
    if not links.shaped:
        return "links not shaped"
    return f"links shaped to {human.rate(links.rate or 'an unnamed rate')}"


class TrainSetting(NamedTuple):
    workload: str
    links: Links
    steps: int | None
    device: str

    def words(self) -> str:
        steps = "" if self.steps is None else f", {self.steps:,} steps"
        return f"{self.workload}{steps}, {_on(self.device)}{self.links.words()}"


class StepSetting(NamedTuple):
    parameters: int
    batch: int
    links: Links
    workload: str | None
    device: str

    def words(self) -> str:
        name = "" if self.workload is None else f"{self.workload}, "
        millions = human.digits(self.parameters / 1e6)
        size = f"{millions} M parameters, batch {self.batch}"
        return f"{name}{size}, {_on(self.device)}{self.links.words()}"


class KernelSetting(NamedTuple):
    device: str
    backend: str
    numel: int
    threads: int

    def words(self) -> str:
        threads = f" in {self.threads} threads" if self.device == "cpu" and self.threads > 1 else ""
        return f"{self.numel:,} elements on {self.device}, {self.backend} kernels{threads}"


def kernel_setting(record: KernelRecord) -> KernelSetting:
    return KernelSetting(record.device, record.backend, record.numel, record.threads)


def train_setting(record: TrainRecord) -> TrainSetting:
    return TrainSetting(record.workload, _links(record), record.steps, record.device)


def step_setting(record: StepRecord) -> StepSetting:
    links = _links(record)
    return StepSetting(record.parameters, record.batch, links, record.workload, record.device)


def _on(device: str) -> str:
    return "" if device == "cpu" else f"{device}, "


def group(records: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """The records by `key`, both in order of first appearance."""
    groups: dict[K, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _links(record: TrainRecord | StepRecord) -> Links:
    return Links(record.workers, record.rate if record.shaped else None, record.shaped)
