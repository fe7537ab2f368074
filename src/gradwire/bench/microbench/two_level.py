"""`gradwire bench kernels --levels`: the cost of sparsifying at two factors.

GraVAC compares two factors at every step. In two levels the second selection reads only what the
first selected; compressing twice reads the whole gradient again.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradwire import kernels
from gradwire.bench import human
from gradwire.bench.machine import check_device, device_name, machine_facts
from gradwire.bench.microbench.ef_step import TimedCall, replay_of
from gradwire.bench.microbench.measure import Cost, Stopwatch, check_setting, cost, stopwatch
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import LevelsRecord
from gradwire.bench.time_left import TimeLeft
from gradwire.compressors._sparsifier import Sparsifier
from gradwire.control.two_level import (
    GainMeter,
    check_has_ratio,
    sparsifier_of,
    two_level,
    with_factor,
)
from gradwire.errors import ConfigError
from gradwire.spec import format_spec, parse
from gradwire.types import EFInput, EncodeContext

SPECS = tuple(f"{name}:ratio=0.1" for name in ("topk", "dgc", "redsync", "sidco", "randomk"))

ROUNDS = 3
"""Repetitions; in the first, caches are cold."""


@dataclass(frozen=True)
class LevelsBench:
    """Measures every sparsifier at every size."""

    factors: tuple[float, float]
    device: str
    sizes: tuple[int, ...]
    specs: tuple[str, ...]
    threads: int
    json_path: Path | None
    command: str
    commit: str | None = None

    def __post_init__(self) -> None:
        low, high = self.factors
        if not 1 < low < high:
            raise ConfigError(f"levels: factors must be 1 < low < high, got {low:g},{high:g}")

    def run(self, console: Console) -> list[LevelsRecord]:
        """Measures, shows the table, and adds the records to the file as they come."""
        check_device(self.device)
        device = torch.device(self.device)
        bases = [_sparsifier(spec) for spec in self.specs]
        check_setting(self.sizes, self.threads, device)
        if self.json_path is not None:
            check_writable(self.json_path)
        torch.set_num_threads(self.threads)
        watch = stopwatch(device)
        records: list[LevelsRecord] = []
        time_left, total = TimeLeft(), len(self.sizes) * len(bases)
        for numel in self.sizes:
            for base in bases:
                left = time_left.words(len(records), total)
                line = f"{format_spec(base)}, {numel:,} elements{left}"
                console.print(line, markup=False, highlight=False)
                records.append(self._record(base, numel, device, watch))
                if self.json_path is not None:
                    append(self.json_path, records[-1])
        console.print(_table(records))
        return records

    def _record(
        self, base: Sparsifier, numel: int, device: torch.device, watch: Stopwatch
    ) -> LevelsRecord:
        x = torch.randn(numel, device=device) * 1e-3
        ef = EFInput(x, torch.zeros_like(x), torch.empty_like(x), 1.0)
        ctx = EncodeContext((numel,))

        # Positions of variable number require a sync of the host.
        syncs_host = base.traits().variable_length or base.traits().syncs_host

        def timed(select: TimedCall) -> Cost:
            return cost(select, lambda: replay_of(select), syncs_host, watch, device)

        # Alternating, so that warm caches favour neither.
        both = [
            (
                timed(lambda: in_two_levels(base, self.factors, ef, ctx)),
                timed(lambda: twice(base, self.factors, ef, ctx)),
            )
            for _ in range(ROUNDS)
        ]
        two_us, twice_us = (median(one.us for one in each) for each in zip(*both, strict=True))
        return LevelsRecord(
            spec=format_spec(base).partition(":")[0],
            factors=self.factors,
            device=device_name(self.device),
            backend=kernels.backend_for(device),
            numel=numel,
            two_levels_us=two_us,
            twice_us=twice_us,
            ratio=twice_us / two_us,
            by="eager" if both[0][0].graph_us is None else "graph",
            command=self.command,
            machine=machine_facts() | ({"commit": self.commit} if self.commit else {}),
        )


def in_two_levels(
    base: Sparsifier, factors: tuple[float, float], ef: EFInput, ctx: EncodeContext
) -> Tensor:
    """Selects as GraVAC does: the values of the second factor among those of the first."""
    made = sparsifier_of(
        two_level(base, *factors, "candidate", candidate_only=False, gain_meter=GainMeter(raw=True))
    )
    index = made.select(ef, ctx)
    assert ef.residual_out is not None
    return ef.residual_out[index]


def twice(
    base: Sparsifier, factors: tuple[float, float], ef: EFInput, ctx: EncodeContext
) -> tuple[Tensor, Tensor]:
    """Selects the values of both factors, each among all values."""
    low, high = (with_factor(base, factor) for factor in factors)
    assert ef.residual_out is not None
    first = ef.residual_out[low.select(ef, ctx)]
    return first, ef.residual_out[high.select(EFInput(ef.residual_out), ctx)]


def _sparsifier(spec: str) -> Sparsifier:
    compressor = parse(spec)
    check_has_ratio("levels", compressor)
    return sparsifier_of(compressor)


def _table(records: list[LevelsRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    for name in ("elements", "in two levels", "twice", "twice / two levels"):
        table.add_column(name, justify="right")
    for r in records:
        times = human.duration_ms(r.two_levels_us / 1e3), human.duration_ms(r.twice_us / 1e3)
        table.add_row(r.spec, f"{r.numel:,}", *times, f"{r.ratio:.2f}")
    return table
