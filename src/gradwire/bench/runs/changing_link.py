"""Trains on links that change their rate: `python -m gradwire.bench.runs.changing_link`.

Shows whether a controller adapts, beside fixed settings.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from gradwire.bench.cases.parse import split_cases
from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append
from gradwire.bench.records.schema import FollowRecord, Phase
from gradwire.bench.worker.launch import run_turns
from gradwire.bench.worker.protocol import Failed, Finished, Job, Message, Started, Tick
from gradwire.errors import ConfigError, PeerError
from gradwire.testbed.cluster import TestbedCluster
from gradwire.testbed.hosts import Testbed

CASES = (
    "none",
    "bf16",
    "topk:ratio=0.1",
    "topk:ratio=0.01",
    "topk:ratio=0.01 @ controller=autopilot",
)
RATES = ("1gbit", "50mbit", "1gbit")


class Changing:
    """Sets the rate when rank 0 tells that it is time, and notes when that was."""

    def __init__(self, testbed: Testbed, rates: Sequence[str], steps: int) -> None:
        self._testbed, self._rates = testbed, rates
        self._due = [0, *accumulate([steps] * (len(rates) - 1))]
        self.begun: list[int] = []
        self.finished: list[tuple[Finished, list[int]]] = []

    def hear(self, message: Message) -> None:
        match message:
            case Started():
                self.begun = []
                self._next(0)
            case Tick(step=step) if self._is_due(step):
                self._next(step)
            case Finished():
                self.finished.append((message, self.begun))
            case Failed(case=case, error=error):
                raise PeerError(f"{case}: {error}")

    def _is_due(self, step: int) -> bool:
        number = len(self.begun)
        return number < len(self._due) and step >= self._due[number]

    def _next(self, step: int) -> None:
        self._testbed.set_rate(self._rates[len(self.begun)])
        self.begun.append(step)


def follow(
    workload: str, cases: Sequence[str], rates: Sequence[str], steps: int, workers: int = 4
) -> list[FollowRecord]:
    """Trains every case through all rates, for `steps` steps each."""
    if steps < 1 or not rates:
        raise ConfigError(f"follow: needs rates and steps, got {list(rates)} and {steps}")
    job = Job(
        workload=workload,
        turns=split_cases(cases),
        steps=steps * len(rates),
        warmup=3,
        evaluate_every=steps * len(rates),
    )
    with Testbed(workers, rates[0]) as testbed:
        changing = Changing(testbed, rates, steps)
        run_turns(TestbedCluster(testbed), job, changing.hear)
    command = shlex.join(["python", "-m", "gradwire.bench.runs.changing_link", *sys.argv[1:]])
    machine = machine_facts()
    return [
        FollowRecord(
            spec=end.case,
            workload=workload,
            workers=workers,
            phases=tuple(_phases(end, begun, rates)),
            timeline=end.timeline,
            command=command,
            machine=machine,
        )
        for end, begun in changing.finished
    ]


def _phases(end: Finished, begun: Sequence[int], rates: Sequence[str]) -> list[Phase]:
    bounds = [*begun, len(end.steps_ms)]
    found = []
    for rate, (first, last) in zip(rates, pairwise(bounds), strict=False):
        taken = end.steps_ms[first:last]
        settings = [change.setting for change in end.timeline if change.step <= last]
        found.append(
            Phase(
                rate=rate,
                first=first,
                steps=last - first,
                seconds=sum(taken) / 1e3,
                settled_ms=median(taken[len(taken) // 2 :] or (0.0,)),
                setting=settings[-1] if settings else None,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire.bench.runs.changing_link", description=__doc__)
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--case", action="append", help="may be given more than once")
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--steps", type=int, default=40, help="at each rate")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rates = given.rates.split(",")
    for record in follow(given.workload, given.case or CASES, rates, given.steps, given.workers):
        if given.json is not None:
            append(given.json, record)
        print(record.spec)
        for phase in record.phases:
            where = "" if phase.setting is None else f", {phase.setting}"
            print(f"  {phase.rate}: {phase.steps} steps in {phase.seconds:.1f} s, ", end="")
            print(f"settled at {phase.settled_ms:.0f} ms{where}")
        for change in record.timeline:
            print(f"  from step {change.step}: {change.setting} ({change.reason})")


if __name__ == "__main__":
    main()
