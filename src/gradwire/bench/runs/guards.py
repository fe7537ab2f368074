"""`gradwire bench guards`: the cost of the non-finite guard and of checksums.

Step times drift and jump by more than a guard costs. So the same workers alternate between a few
steps with a guard and a few without, and the result is the ratio within each round.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from gradwire.bench.cases.parse import is_baseline, parse_case
from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import GuardRecord
from gradwire.bench.runs.progress import ProgressDisplay
from gradwire.bench.worker.launch import run_cases
from gradwire.bench.worker.protocol import Failed, Finished, Job, Message
from gradwire.errors import ConfigError, PeerError
from gradwire.testbed.cluster import Cluster, open_cluster

CASES = ("topk:ratio=0.01", "efsign")
LIMITS: Mapping[str, float] = {"nan": 1.02, "checksum": 1.03}
"""Upper bounds of the ratio of step times with and without each guard."""

_UNGUARDED, _CHECKED = "{} @ nan_policy=ignore", "{} @ checksum=true"


@dataclass(frozen=True)
class GuardBench:
    """`rounds` rounds of `steps` steps of each case: as it is, unguarded, and with checksums."""

    cases: tuple[str, ...]
    workers: int
    rate: str | None
    rounds: int
    steps: int
    warmup: int
    workload: str
    json_path: Path | None
    command: str

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"guards: rounds must be at least 1, got {self.rounds}")
        for case in self.cases:
            if "@" in case:
                raise ConfigError(f"guards: expected a method without options, got {case!r}")
            if is_baseline(case):
                raise ConfigError(f"guards: baselines have no guards, got {case!r}; name a method")
            parse_case(_UNGUARDED.format(case))

    def run(self, console: Console) -> list[GuardRecord]:
        """Measures one case after the other, and shows the results."""
        records: list[GuardRecord] = []
        if self.json_path is not None:
            check_writable(self.json_path)
        with open_cluster(self.workers, self.rate) as cluster:
            if cluster.note is not None:
                console.print(f"Note: {cluster.note}", markup=False, highlight=False)
            for case in self.cases:
                blocks = self._blocks(case, cluster, console)
                found = [self._record(case, guard, blocks, cluster.shaped) for guard in LIMITS]
                records += found
                for record in found:
                    if self.json_path is not None:
                        append(self.json_path, record)
        console.print(_table(records))
        return records

    def _blocks(self, case: str, cluster: Cluster, console: Console) -> dict[str, list[float]]:
        """Returns the median step of every block, by case, in ms."""
        blocks: dict[str, list[float]] = defaultdict(list)
        case_order = _case_order(case, self.rounds)
        job = Job(
            workload=self.workload, case_order=case_order, steps=self.steps, warmup=self.warmup
        )
        with ProgressDisplay(console, sorted(set(case_order)), self.steps, self.rounds) as live:

            def on_message(message: Message) -> None:
                live.show(message)
                _collect(message, blocks)

            run_cases(cluster, job, on_message)
        return blocks

    def _record(
        self, case: str, guard: str, blocks: Mapping[str, Sequence[float]], shaped: bool
    ) -> GuardRecord:
        plain = _UNGUARDED.format(case) if guard == "nan" else case
        guarded = case if guard == "nan" else _CHECKED.format(case)
        without_guard, with_guard = blocks[plain], blocks[guarded]
        ratios = [b / a for a, b in zip(without_guard, with_guard, strict=True)]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        return GuardRecord(
            spec=case,
            guard=guard,
            workers=self.workers,
            rate=self.rate,
            shaped=shaped,
            workload=self.workload,
            rounds=self.rounds,
            steps=self.steps,
            without_ms=median(without_guard),
            with_ms=median(with_guard),
            ratio=middle,
            quartiles=(low, high),
            limit=LIMITS[guard],
            command=self.command,
            machine=machine_facts(),
        )


def _case_order(case: str, rounds: int) -> tuple[str, ...]:
    """Returns the order of cases; it is reversed every other round, since being first may help."""
    one = (_UNGUARDED.format(case), case, _CHECKED.format(case))
    return tuple(
        case_name for i in range(rounds) for case_name in (one if i % 2 == 0 else one[::-1])
    )


def _collect(message: Message, blocks: dict[str, list[float]]) -> None:
    if isinstance(message, Failed):
        raise PeerError(f"guards: {message.case} failed: {message.error}")
    if isinstance(message, Finished):
        blocks[message.case].append(median(message.steps_ms))


def _table(records: Sequence[GuardRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("method", "guard", "without ms", "with ms", "ratio", "quartiles", "limit"):
        table.add_column(name, justify="left" if name in ("method", "guard") else "right")
    for r in records:
        spread = f"{r.quartiles[0]:.3f} to {r.quartiles[1]:.3f}"
        times = f"{r.without_ms:.1f}", f"{r.with_ms:.1f}"
        table.add_row(r.spec, r.guard, *times, f"{r.ratio:.3f}", spread, f"{r.limit:.2f}")
    return table
