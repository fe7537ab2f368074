"""Compares risk labels with recorded runs: `python -m gradwire.bench.predictions.risk_calibration`.

For every study with a dense baseline it takes the excess of each method's final loss over the
dense one, and the level of risk that `advise` gives the method; then the rank correlation of
both, by kind of optimiser. Errors are those of each method on one gradient of low rank with
heavy-tailed noise, since records have none; on a model of the user's `advise` measures them.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from gradwire.auto.accuracy_risk import LEVELS, Level, assess_risk
from gradwire.auto.optimizers import is_adaptive
from gradwire.bench.cases.parse import MethodCase, parse_case, side_of
from gradwire.bench.predictions.measured_model import plan_of
from gradwire.bench.records.files import files_in, read
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError
from gradwire.perfmodel.compression_error import measure_error
from gradwire.perfmodel.compute import Bucket

_SHAPE, _RANK, _STEPS = (256, 512), 16, 3


@dataclass(frozen=True)
class Rated:
    """A method in one study: its level, and its final loss over that of the dense run."""

    study: str
    adaptive: bool
    spec: str
    level: Level
    excess: float
    """Relative excess of the loss; infinite if the run diverged."""


def rate(records: Iterable[TrainRecord]) -> list[Rated]:
    """Rates the plain methods of all studies that have a dense run of the same length."""
    studies: dict[tuple[object, ...], dict[str, list[TrainRecord]]] = defaultdict(dict)
    for record in records:
        if record.status == "done" and record.final_loss is not None and record.workload_spec:
            key = (record.workload_spec, record.workers, record.steps)
            studies[key].setdefault(record.spec, []).append(record)
    return [
        _rated(spec, own, runs[BASELINE])
        for runs in studies.values()
        if BASELINE in runs
        for spec, own in runs.items()
        if _is_plain(spec)
    ]


def _is_plain(spec: str) -> bool:
    """Returns whether every step of a case sends gradients by one method."""
    try:
        case = parse_case(spec)
    except ConfigError:
        # A case of an earlier version.
        return False
    if side_of(spec) != "gradient":
        return False
    return isinstance(case, MethodCase) and case.make_controller() is None and case.auto() is None


def _rated(spec: str, runs: Sequence[TrainRecord], dense: Sequence[TrainRecord]) -> Rated:
    first = runs[0]
    workload = parse_workload(first.workload_spec or "", None, "cpu")
    adaptive = is_adaptive(workload.optimiser(nn.Linear(2, 2)))
    level = _level(spec, first.workers, adaptive)
    own, base = (fmean(r.final_loss or 0.0 for r in of) for of in (runs, dense))
    title = f"{workload.name}, {first.workers} workers, {first.steps} steps"
    return Rated(title, adaptive, spec, level, own / base - 1)


@cache
def _level(spec: str, workers: int, adaptive: bool) -> Level:
    steps = _gradients()
    tensors: dict[str, Tensor] = dict(zip(*steps[0][0], strict=True))
    plan = plan_of(spec, tensors, workers)
    return assess_risk(plan, measure_error(plan, tensors, steps), workers, adaptive).level


@cache
def _gradients() -> list[list[Bucket]]:
    """Returns the gradients of some steps: a common part of low rank, and noise with outliers."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = _SHAPE
    decay = torch.arange(1, _RANK + 1).float().rsqrt()
    left = torch.randn(rows, _RANK, generator=generator) * decay
    common = left @ torch.randn(_RANK, columns, generator=generator)
    found = []
    for _ in range(_STEPS):
        noise = torch.randn(_SHAPE, generator=generator)
        scales = torch.rand(_SHAPE, generator=generator).clamp_min(1e-3).rsqrt()
        found.append([Bucket(["weight"], [common + noise * scales])])
    return found


def rank_correlation(levels: Sequence[float], losses: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank."""
    pairs = [_ranks(levels), _ranks(losses)]
    centred = [[rank - fmean(ranks) for rank in ranks] for ranks in pairs]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    squares = [sum(a * a for a in ranks) for ranks in centred]
    return product / (squares[0] * squares[1]) ** 0.5 if all(squares) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def correlations(rated: Sequence[Rated]) -> dict[str, float]:
    """Returns the mean over studies of the correlation inside each, by kind of optimiser."""
    found: dict[str, list[float]] = defaultdict(list)
    for study in dict.fromkeys(row.study for row in rated):
        rows = [row for row in rated if row.study == study]
        if len({row.spec for row in rows}) < 4:
            continue
        levels = [float(LEVELS.index(row.level)) for row in rows]
        kind = "adaptive" if rows[0].adaptive else "sgd"
        found[kind].append(rank_correlation(levels, [row.excess for row in rows]))
    return {kind: fmean(values) for kind, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gradwire.bench.predictions.risk_calibration", description=__doc__
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/studies"))
    args = parser.parse_args()
    rated = rate(r for r in read(files_in([args.folder])) if isinstance(r, TrainRecord))
    for row in sorted(rated, key=lambda row: (row.adaptive, row.study, row.excess)):
        print(f"{row.study}: {row.spec}: {row.level}, loss {row.excess:+.1%}")
    for kind, value in correlations(rated).items():
        print(f"rank correlation, {kind}: {value:.2f}")


if __name__ == "__main__":
    main()
