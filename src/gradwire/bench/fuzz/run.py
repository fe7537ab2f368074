"""`gradwire bench fuzz`: distributes hostile messages over all methods; one record per method."""

import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from zlib import crc32

import torch
from rich.console import Console

from gradwire.bench.fuzz.mutate import ANY_LENGTH, SAME_LENGTH
from gradwire.bench.fuzz.targets import DECODE, Case, Target, all_specs, cases_of, open_target
from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import FuzzRecord
from gradwire.bench.time_left import TimeLeft
from gradwire.errors import ConfigError, WireError

DECODER_SHARE = 0.9
"""Share of messages sent to the decoder of a method that has one; the rest arrive during steps."""

CRASHES_KEPT = 10


@dataclass
class Tally:
    """Counts the outcomes of the messages to one method."""

    messages: int = 0
    decoded: int = 0
    refused: int = 0
    crashes: list[str] = field(default_factory=list)

    def attack(self, target: Target, case: Case, count: int, rng: random.Random) -> None:
        """Sends `count` mutated messages; any outcome but a gradient or a WireError is a crash."""
        for number in range(count):
            point = rng.choice(target.points)
            other = rng.choice(target.points).message.numpy()
            mutation = rng.choice(SAME_LENGTH if point.fixed else ANY_LENGTH)
            message = torch.from_numpy(mutation(point.message.numpy(), other, rng).copy())
            self.messages += 1
            try:
                target.receive(point, message, at_end=number % 2 == 0)
                self.decoded += 1
            except WireError:
                self.refused += 1
            except Exception as error:
                text = f"{case}, call {point.call}, {mutation.__name__}: {error!r}"
                self.crashes.append(f"{text}; message {bytes(message.tolist()).hex()}")
        if damage := target.damage():
            self.crashes.append(f"{case}: {damage}")


@dataclass(frozen=True)
class Fuzz:
    """Sends hostile messages to every method; the same seed sends the same messages."""

    messages: int
    seed: int
    specs: Sequence[str]
    json_path: Path | None
    command: str

    def __post_init__(self) -> None:
        if self.messages < 1:
            raise ConfigError(f"bench fuzz: messages must be at least 1, got {self.messages}")

    def run(self, console: Console) -> bool:
        """Returns True if nothing crashed. Shows and writes one line per method."""
        torch.set_num_threads(1)
        if self.json_path is not None:
            check_writable(self.json_path)
        specs = self.specs or all_specs()
        each = -(-self.messages // len(specs))
        total, time_left = Tally(), TimeLeft()
        for number, spec in enumerate(specs, start=1):
            before_s, before_kb = process_time(), _peak_kb()
            tally = self._method(spec, each)
            self._write(spec, tally, process_time() - before_s, _peak_kb() - before_kb)
            total.messages += tally.messages
            total.decoded += tally.decoded
            total.refused += tally.refused
            total.crashes += tally.crashes
            left = time_left.words(number, len(specs))
            console.print(_line(spec, tally) + left, markup=False, highlight=False)
        for text in (*total.crashes[:CRASHES_KEPT], _line("all", total)):
            console.print(text, markup=False, highlight=False)
        return not total.crashes

    def _method(self, spec: str, count: int) -> Tally:
        tally = Tally()
        cases = cases_of(spec)
        steps = [case for case in cases if case.exchange != DECODE]
        to_steps = count if len(steps) == len(cases) else count - round(DECODER_SHARE * count)
        for number, case in enumerate(cases):
            share = count - to_steps
            if case.exchange != DECODE:
                share = (to_steps + steps.index(case)) // len(steps)
            rng = random.Random(crc32(f"{self.seed} {number} {case}".encode()))
            tally.attack(open_target(case), case, share, rng)
        return tally

    def _write(self, spec: str, tally: Tally, cpu_s: float, peak_grown_kb: int) -> None:
        if self.json_path is None:
            return
        record = FuzzRecord(
            spec=spec,
            ways=tuple(case.exchange for case in cases_of(spec)),
            messages=tally.messages,
            decoded=tally.decoded,
            refused=tally.refused,
            crashes=len(tally.crashes),
            crash_texts=tuple(tally.crashes[:CRASHES_KEPT]),
            cpu_s=round(cpu_s, 3),
            peak_grown_kb=peak_grown_kb,
            seed=self.seed,
            command=self.command,
            machine=machine_facts(),
        )
        append(self.json_path, record)


def _line(name: str, tally: Tally) -> str:
    return (
        f"{name}: {tally.messages:,} messages, {tally.decoded:,} decoded, "
        f"{tally.refused:,} refused, {len(tally.crashes)} crashes"
    )


def _peak_kb() -> int:
    """Returns the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
