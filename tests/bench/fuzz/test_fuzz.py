"""Hostile bytes: every decoder decodes or refuses them, and one that does not is detected."""

import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.bench.fuzz.mutate import ANY_LENGTH, SAME_LENGTH
from gradwire.bench.fuzz.run import Tally
from gradwire.bench.fuzz.targets import Case, Target, all_specs, cases_of, open_target
from gradwire.errors import WireError
from gradwire.spec import compressor_classes, exchange_classes, format_spec

SPECS = all_specs()
USUAL = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
# Opening a case takes a while, so its examples share it.
UNHURRIED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

opened = cache(open_target)
found = cache(cases_of)


def fuzz(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, so that a crash can be observed."""
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "bench", "fuzz", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_all_methods_and_exchanges_are_covered() -> None:
    heads = {spec.partition("|")[0].partition(":")[0].strip() for spec in SPECS}
    assert heads == set(compressor_classes())
    assert sum("|" in spec for spec in SPECS) > 100
    exchanges = {case.exchange for spec in SPECS for case in found(spec)}
    robust = {f"gather:aggregate={name}" for name in ("majority", "median", "trimmed", "diameter")}
    assert exchanges >= {"decode", *robust}
    assert {exchange.partition(":")[0] for exchange in exchanges} == {"decode", *exchange_classes()}


@pytest.mark.timeout(240)
def test_every_method_decodes_or_refuses(tmp_path: Path) -> None:
    """Messages lie beside inaccessible pages, so one byte too far would end the process."""
    specs = [*USUAL, *[spec for spec in SPECS if "|" in spec][::9]]
    file = tmp_path / "fuzz.jsonl"
    cases = [f"--case={spec}" for spec in specs]
    done = fuzz("--messages", "4000", "--seed", "7", "--json", str(file), *cases)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["spec"] for row in rows] == specs
    assert sum(row["messages"] for row in rows) >= 4000
    assert all(row["messages"] == row["decoded"] + row["refused"] for row in rows)
    assert sum(row["refused"] for row in rows) > 1000
    assert sum(row["decoded"] for row in rows) > 1000
    # Tensors have a thousand entries: memory grows by code that is loaded at first use.
    assert sum(row["peak_grown_kb"] for row in rows) < 300_000


@pytest.mark.timeout(240)
def test_compiled_loops_stay_inside_their_arrays(tmp_path: Path) -> None:
    """Numba checks every index here, also those into a decoder's own arrays."""
    specs = [*USUAL, "topk:ratio=0.1 | qsgd:bits=3", "threshold:value=0.01 | efsign"]
    done = fuzz(
        "--messages", "600", *(f"--case={spec}" for spec in specs),
        NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@st.composite
def hostile(draw: st.DrawFn) -> tuple[Case, random.Random]:
    case = draw(st.sampled_from(SPECS).flatmap(lambda spec: st.sampled_from(found(spec))))
    return case, draw(st.randoms(use_true_random=False))


@UNHURRIED
@given(hostile())
@pytest.mark.timeout(240)
def test_any_message_is_decoded_or_refused(drawn: tuple[Case, random.Random]) -> None:
    case, rng = drawn
    target = opened(case)
    point = rng.choice(target.points)
    mutation = rng.choice(SAME_LENGTH if point.fixed else ANY_LENGTH)
    message = mutation(point.message.numpy(), rng.choice(target.points).message.numpy(), rng)
    try:
        out = target.receive(point, torch.from_numpy(message.copy()))
        assert out.dtype == torch.float32
    except WireError:
        pass
    assert not target.damage()


@pytest.mark.parametrize("spec", USUAL)
def test_a_valid_message_is_decoded(spec: str) -> None:
    for case in found(spec):
        target = opened(case)
        for point in target.points:
            assert target.receive(point, point.message).isfinite().all()


def test_a_decoder_without_checks_is_detected() -> None:
    """Without its check a message can point anywhere: the process dies, or an error is raised."""
    code = """
import gradwire.compressors._sparsifier
gradwire.compressors._sparsifier.check_index = lambda *_: None
from rich.console import Console
from gradwire.bench.fuzz.run import Fuzz
raise SystemExit(0 if Fuzz(3000, 0, ["topk:ratio=0.1"], None, "").run(Console()) else 1)
"""
    assert python(code).returncode != 0


@pytest.mark.parametrize(("at_end", "offset"), [(True, "shape[0]"), (False, "-1")])
def test_one_byte_beyond_ends_the_process(at_end: bool, offset: str) -> None:
    code = f"""
import ctypes, torch
from gradwire.bench.fuzz.guard_pages import GuardedMemory
held = GuardedMemory(100).hold(torch.arange(7, dtype=torch.uint8), at_end={at_end})
assert held.tolist() == list(range(7))
print("inside", flush=True)
ctypes.c_uint8.from_address(held.data_ptr() + {offset.replace("shape[0]", "7")}).value
print("beyond", flush=True)
"""
    done = python(code)
    assert done.stdout.split() == ["inside"]
    assert done.returncode < 0


class Careless(Target):
    """Raises another exception than WireError, and reports damage."""

    def __init__(self) -> None:
        self.points = opened(Case("efsign", "decode")).points

    def receive(self, point: object, message: torch.Tensor, *, at_end: bool = True) -> torch.Tensor:
        raise IndexError("beyond")

    def damage(self) -> str:
        return "it remembers"


def test_any_other_exception_is_a_crash() -> None:
    tally = Tally()
    tally.attack(Careless(), Case("careless", "decode"), 3, random.Random(0))
    assert (tally.messages, tally.decoded, tally.refused) == (3, 0, 0)
    assert len(tally.crashes) == 4
    assert "IndexError('beyond')" in tally.crashes[0]
    assert tally.crashes[-1] == "careless by decode: it remembers"
