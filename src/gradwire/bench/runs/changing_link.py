"""Trains on links that change their rate: `python -m gradwire.bench.runs.changing_link`.

Shows whether a controller or the automatic mode adapts, and after how many steps, beside fixed
settings.
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
from gradwire.bench.worker.launch import run_cases
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
    "auto",
)
RATES = ("1gbit", "50mbit", "1gbit")


class RateSchedule:
    """Sets the next rate when rank 0 reports its first step, and records that step."""

    def __init__(self, testbed: Testbed, rates: Sequence[str], steps: int) -> None:
        self._testbed, self._rates = testbed, rates
        self._rate_steps = [0, *accumulate([steps] * (len(rates) - 1))]
        self.first_steps: list[int] = []
        self.finished: list[tuple[Finished, list[int]]] = []

    def receive(self, message: Message) -> None:
        match message:
            case Started():
                self.first_steps = []
                self._set_next_rate(0)
            case Tick(step=step) if self._is_due(step):
                self._set_next_rate(step)
            case Finished():
                self.finished.append((message, self.first_steps))
            case Failed(case=case, error=error):
                raise PeerError(f"{case}: {error}")

    def _is_due(self, step: int) -> bool:
        number = len(self.first_steps)
        return number < len(self._rate_steps) and step >= self._rate_steps[number]

    def _set_next_rate(self, step: int) -> None:
        self._testbed.set_rate(self._rates[len(self.first_steps)])
        self.first_steps.append(step)


def run_changing_link(
    workload: str, cases: Sequence[str], rates: Sequence[str], steps: int, workers: int = 4
) -> list[FollowRecord]:
    """Trains every case through all rates, with `steps` steps at each."""
    if steps < 1 or not rates:
        raise ConfigError(f"changing_link: needs rates and steps, got {list(rates)} and {steps}")
    job = Job(
        workload=workload,
        case_order=split_cases(cases),
        steps=steps * len(rates),
        warmup=3,
        evaluate_every=steps * len(rates),
    )
    with Testbed(workers, rates[0]) as testbed:
        schedule = RateSchedule(testbed, rates, steps)
        run_cases(TestbedCluster(testbed), job, schedule.receive)
    command = shlex.join(["python", "-m", "gradwire.bench.runs.changing_link", *sys.argv[1:]])
    machine = machine_facts()
    return [
        FollowRecord(
            spec=end.case,
            workload=workload,
            workers=workers,
            phases=tuple(_phases(end, first_steps, rates)),
            timeline=end.timeline,
            command=command,
            machine=machine,
        )
        for end, first_steps in schedule.finished
    ]


def _phases(end: Finished, first_steps: Sequence[int], rates: Sequence[str]) -> list[Phase]:
    bounds = [*first_steps, len(end.steps_ms)]
    found = []
    for rate, (first, last) in zip(rates, pairwise(bounds), strict=False):
        taken = end.steps_ms[first:last]
        settings = [change.setting for change in end.timeline if change.step <= last]
        before = [change.setting for change in end.timeline if change.step <= first]
        changes = [
            change.step - first
            for change in end.timeline
            if first < change.step <= last and [change.setting] != before[-1:]
        ]
        found.append(
            Phase(
                rate=rate,
                first=first,
                steps=last - first,
                seconds=sum(taken) / 1e3,
                settled_ms=median(taken[len(taken) // 2 :] or (0.0,)),
                setting=settings[-1] if settings else None,
                changed_after=min(changes, default=None),
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
    args = parser.parse_args()
    rates = args.rates.split(",")
    for record in run_changing_link(
        args.workload, args.case or CASES, rates, args.steps, args.workers
    ):
        if args.json is not None:
            append(args.json, record)
        print(record.spec)
        for phase in record.phases:
            where = "" if phase.setting is None else f", {phase.setting}"
            print(f"  {phase.rate}: {phase.steps} steps in {phase.seconds:.1f} s, ", end="")
            after = phase.changed_after
            changed = "" if after is None else f", first changed after {after} steps"
            print(f"settled at {phase.settled_ms:.0f} ms{where}{changed}")
        for change in record.timeline:
            print(f"  from step {change.step}: {change.setting} ({change.reason})")


if __name__ == "__main__":
    main()
