"""Scenarios for the tests, each in a process of its own: `scenarios.py NAME` prints JSON lines."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from gradwire.bench.faults.injection import Fault, Phase
from gradwire.bench.faults.jobs import Job
from gradwire.bench.faults.runner import Attempt, Event, HostRunner, React
from gradwire.testbed.hosts import Testbed

RATE = "100mbit"
JOB = Job()
# A message takes some 50 ms, so that a kill can hit the middle of it.
LARGE = Job(spec="topk:ratio=0.25", width=512)


def kills() -> None:
    """Kills one of four ranks in each phase of a step, and lets one fail by itself."""
    with Testbed(4, RATE) as testbed:
        runner = prepared(testbed, LARGE)
        phases: list[Phase] = ["encode", "wire", "decode"]
        for rank, phase in enumerate(phases):
            attempt = runner.run(LARGE, Fault("kill", rank, step=2, phase=phase, delay_s=0.02))
            show(phase, attempt, detected_s=detected_s(attempt), missed=attempt.of("missed"))
        show("hook", runner.run(LARGE, Fault("raise", 3, step=2)))


def waits() -> None:
    """Slows, stops or disconnects hosts for less than the timeout."""
    patient = replace(JOB, timeout_s=30.0)
    with Testbed(4, RATE) as testbed:
        runner = prepared(testbed, patient)
        show("undisturbed", runner.run(patient))
        slow = replace(patient, lazy={"3": 0.2})
        show("slow and stopped", runner.run(slow, react=once(1, 3, stop_for(3.0))))
        show("cut", runner.run(patient, react=once(2, 3, cut_for(testbed, 2, 5.0))))


def gives_up() -> None:
    """Stops or disconnects a host for longer than the timeout."""
    hasty = replace(JOB, timeout_s=2.0)
    with Testbed(4, RATE) as testbed:
        runner = prepared(testbed, hasty)
        for name, rank, act in (
            ("stopped", 1, stop_for(3.5)),
            ("cut", 2, cut_for(testbed, 2, 3.5)),
        ):
            attempt = runner.run(hasty, react=once(rank, 3, act))
            last = [e["at_s"] for e in attempt.of("step") if (e["rank"], e["step"]) == (rank, 3)]
            show(name, attempt, stalled_at_s=last[0])


def prepared(testbed: Testbed, job: Job) -> HostRunner:
    runner = HostRunner(testbed)
    runner.prepare(job)
    return runner


def detected_s(attempt: Attempt) -> list[float]:
    """Returns the seconds from the kill to the error of each surviving rank."""
    [killed] = attempt.of("fault")
    return [e["at_s"] - killed["at_s"] for e in attempt.of("error")]


def show(name: str, attempt: Attempt, **more: object) -> None:
    row = {"name": name, "codes": attempt.codes, "errors": attempt.of("error")}
    last_s = attempt.events[-1]["at_s"] - attempt.events[0]["at_s"]
    print(
        json.dumps({**row, "weights": [*attempt.weights().values()], "took_s": last_s, **more}),
        flush=True,
    )


def once(rank: int, step: int, act: Callable[[int], None]) -> React:
    """Returns a reaction that acts on a rank's process when it has finished a step."""

    def react(event: Event, pids: list[int]) -> None:
        if (event["event"], event["rank"], event.get("step")) == ("step", rank, step):
            act(pids[rank])

    return react


def stop_for(wait_s: float) -> Callable[[int], None]:
    def act(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(wait_s, os.kill, [pid, signal.SIGCONT]).start()

    return act


def cut_for(testbed: Testbed, host: int, wait_s: float) -> Callable[[int], None]:
    def act(_: int) -> None:
        testbed.cut(host)
        threading.Timer(wait_s, testbed.restore, [host]).start()

    return act


if __name__ == "__main__":
    {"kills": kills, "waits": waits, "gives_up": gives_up}[sys.argv[1]]()
