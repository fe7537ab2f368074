"""A convergence study: workload, methods, steps and seeds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradwire.bench.workloads.base import workload_classes
from gradwire.spec import read_settings


@dataclass(frozen=True)
class Study:
    """Trains every case with every seed; cases are written as for `gradwire bench train`."""

    summary: str
    workload: str
    steps: int
    cases: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    workers: int = 8
    evaluations: int = 12
    target: str | None = None
    rates: tuple[str, ...] = ("10gbit", "1gbit", "100mbit")
    latency: str = "0.1ms"
    by_case: bool = False
    """True if all seeds of a case run before the next case, so that the first rows are complete."""
    learning_rates: tuple[float, ...] = ()
    """Every case is trained with each of these, instead of the workload's."""
    shorter: tuple[float, ...] = ()
    """Every case is also trained for these fractions of `steps`, each with a schedule of its own
    length: the time to a target is then that of the fastest of its runs."""

    smoke_workers: int = 2
    smoke_every: int = 1
    """One case in so many is part of the smoke form, where cases differ in one setting only."""

    def with_changes(
        self,
        workload: str | None,
        steps: int | None,
        seeds: tuple[int, ...] | None,
        cases: Iterable[str] | None,
        workers: int | None = None,
    ) -> "Study":
        """Returns the study with the given fields replaced."""
        return replace(
            self,
            workload=workload or self.workload,
            steps=self.steps if steps is None else steps,
            seeds=seeds or self.seeds,
            cases=tuple(cases or self.cases),
            workers=self.workers if workers is None else workers,
            learning_rates=() if workload else self.learning_rates,
        )

    def by_length(self) -> tuple["Study", ...]:
        """Returns the study at its own length, and at each of its shorter ones."""
        lengths = (self.steps, *(round(self.steps * fraction) for fraction in self.shorter))
        return tuple(replace(self, steps=steps, shorter=()) for steps in lengths)

    def by_learning_rate(self) -> tuple["Study", ...]:
        """Returns the study with each of its learning rates, or the study alone."""
        joint = "," if ":" in self.workload else ":"
        grid = [f"{self.workload}{joint}learning_rate={rate!r}" for rate in self.learning_rates]
        return tuple(replace(self, workload=w, learning_rates=()) for w in grid) or (self,)

    def smoke(self) -> "Study":
        """Returns a few steps of every case on the tiny form of the workload, with synthetic data.

        Of the workload's settings only `flat`, which decides what methods select among, and
        `images` stay.
        """
        name, settings = read_settings(self.workload)
        workload = workload_classes()[name]
        kept: dict[str, str] = {key: settings[key] for key in ("flat", "images") if key in settings}
        if workload.source is not None:
            kept["synthetic"] = "true"
        text = ",".join(f"{key}={value}" for key, value in kept.items())
        return replace(
            self,
            workload=f"{name}-tiny:{text}" if text else f"{name}-tiny",
            cases=self.cases[:: self.smoke_every],
            # Enough for a sync of every local method but one with 256 steps between syncs.
            steps=33,
            seeds=(0,),
            workers=self.smoke_workers,
            evaluations=1,
            target=None,
            rates=("1gbit",),
            learning_rates=(),
            shorter=(),
        )


def distinct_cases(studies: Iterable[Study]) -> tuple[Study, ...]:
    """Returns studies without the cases that one before them has; each keeps one at least."""
    found: list[Study] = []
    seen: set[str] = set()
    for study in studies:
        new = tuple(case for case in study.cases if case not in seen)
        found.append(replace(study, cases=new or study.cases[:1]))
        seen.update(study.cases)
    return tuple(found)
