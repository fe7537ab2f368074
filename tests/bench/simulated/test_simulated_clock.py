"""What time it would be: bytes wait for nobody while steps are computed that they may take."""

import pytest

from gradwire.bench.cases.local import LocalCase, Rhythm
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.predictions.simulate import Links
from gradwire.bench.simulated.base import Seen
from gradwire.bench.simulated.clock import CountedPace
from gradwire.bench.workloads.base import Evaluation

COMPUTE_S = 0.01
HOPS = 6
"""Of a ring of four."""


def step_s(rhythm: Rhythm, wire_s: float, latency_s: float = 0.0, steps: int = 80) -> float:
    """The mean step where every telling is one call whose bytes take so long."""
    tellings = steps // rhythm.gap
    sent = round(tellings * wire_s * 1e9 / 8)
    seen = Seen(steps, Evaluation(1.0, "accuracy", 0.5), sent, tellings, ())
    pace = CountedPace(Links(1e9, latency_s), COMPUTE_S, 4, rhythm)
    [mean_ms] = pace.steps_ms(seen)
    return mean_ms / 1e3


@pytest.mark.parametrize(
    ("rhythm", "wire_s", "expected"),
    [
        (Rhythm(8), 0.04, 0.015),
        (Rhythm(8, 2), 0.04, 0.0125),
        (Rhythm(8, 4), 0.04, 0.01),
        (Rhythm(8, 7), 0.04, 0.01),
        (Rhythm(8, 7), 0.15, 0.02),
        (Rhythm(1), 0.02, 0.03),
        # Fragments that travel for longer than until the next: the link is never idle.
        (Rhythm(4, 7), 0.08, 0.02),
        (Rhythm(4, 7), 0.04, 0.01),
    ],
)
def test_the_wire_hides_behind_so_many_steps(
    rhythm: Rhythm, wire_s: float, expected: float
) -> None:
    assert step_s(rhythm, wire_s) == pytest.approx(expected)


def test_latencies_hide_too() -> None:
    assert step_s(Rhythm(8), 0.0, latency_s=0.004) == pytest.approx(0.01 + HOPS * 0.004 / 8)
    assert step_s(Rhythm(8, 2), 0.0, latency_s=0.004) == pytest.approx(0.01 + 0.004 / 8)


def test_nothing_has_been_told_at_the_start() -> None:
    seen = Seen(0, Evaluation(1.0, "accuracy", 0.5), 0, 0, ())
    assert CountedPace(Links(1e9, 0.001), COMPUTE_S, 4, Rhythm(8, 7)).time_s(seen) == 0.0


@pytest.mark.parametrize(
    ("text", "rhythm"),
    [
        ("int4 @ local=(qsparse:sync_every=8)", Rhythm(8)),
        ("int4 @ local=(qsparse:sync_every=8,delay=7)", Rhythm(8, 7)),
        ("none @ local=(local_sgd:sync_every=4,delay=1)", Rhythm(4, 1)),
        ("fp16 @ local=(diloco:sync_every=8,fragments=2,delay=5)", Rhythm(4, 5)),
        ("topk:ratio=0.1 @ local=(sparseloco:sync_every=8,delay=5)", Rhythm(8, 5)),
        ("topk:ratio=0.1 @ local=(cser:sync_every=8,errors=topk:ratio=0.5)", Rhythm(1)),
    ],
)
def test_the_rhythm_of_a_case(text: str, rhythm: Rhythm) -> None:
    case = parse_case(text)
    assert isinstance(case, LocalCase)
    assert case.rhythm() == rhythm
