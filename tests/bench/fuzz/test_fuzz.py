"""Hostile bytes: every decoder reads or refuses them, and whoever does not is found out."""

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
# The first example of a case opens it, which takes a while; the others do not.
UNHURRIED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

opened = cache(open_target)
found = cache(cases_of)


def fuzz(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where a crash can be seen and survived."""
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "bench", "fuzz", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_nothing_in_the_folders_is_left_out() -> None:
    heads = {spec.partition("|")[0].partition(":")[0].strip() for spec in SPECS}
    assert heads == set(compressor_classes())
    assert sum("|" in spec for spec in SPECS) > 100
    ways = {case.exchange for spec in SPECS for case in found(spec)}
    robust = {f"gather:aggregate={name}" for name in ("majority", "median", "trimmed", "diameter")}
    assert ways >= {"decode", *robust}
    assert {way.partition(":")[0] for way in ways} == {"decode", *exchange_classes()}


@pytest.mark.timeout(240)
def test_every_method_reads_or_refuses(tmp_path: Path) -> None:
    """Messages lie beside pages that kill, so one byte too far would end the process."""
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
    # Tensors of a thousand entries: what grows is code, loaded at the first use.
    assert sum(row["peak_grown_kb"] for row in rows) < 300_000


@pytest.mark.timeout(240)
def test_compiled_loops_stay_inside_their_arrays(tmp_path: Path) -> None:
    """Numba checks every index here, also into what a decoder makes for itself."""
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
def test_any_message_is_read_or_refused(drawn: tuple[Case, random.Random]) -> None:
    case, dice = drawn
    target = opened(case)
    place = dice.choice(target.places)
    mutation = dice.choice(SAME_LENGTH if place.fixed else ANY_LENGTH)
    message = mutation(place.said.numpy(), dice.choice(target.places).said.numpy(), dice)
    try:
        out = target.hears(place, torch.from_numpy(message.copy()))
        assert out.dtype == torch.float32
    except WireError:
        pass
    assert not target.spoilt()


@pytest.mark.parametrize("spec", USUAL)
def test_an_honest_message_is_read(spec: str) -> None:
    for case in found(spec):
        target = opened(case)
        for place in target.places:
            assert target.hears(place, place.said).isfinite().all()


def test_a_decoder_that_does_not_check_is_found_out() -> None:
    """Without its check a message can point anywhere: the process dies, or it is an error."""
    code = """
import gradwire.compressors._sparsifier
gradwire.compressors._sparsifier.check_index = lambda *_: None
from rich.console import Console
from gradwire.bench.fuzz.run import Fuzz
raise SystemExit(0 if Fuzz(3000, 0, ["topk:ratio=0.1"], None, "").run(Console()) else 1)
"""
    assert python(code).returncode != 0


@pytest.mark.parametrize(("at_end", "place"), [(True, "shape[0]"), (False, "-1")])
def test_one_byte_beyond_ends_the_process(at_end: bool, place: str) -> None:
    code = f"""
import ctypes, torch
from gradwire.bench.fuzz.guard_pages import Guarded
held = Guarded(100).hold(torch.arange(7, dtype=torch.uint8), at_end={at_end})
assert held.tolist() == list(range(7))
print("inside", flush=True)
ctypes.c_uint8.from_address(held.data_ptr() + {place.replace("shape[0]", "7")}).value
print("beyond", flush=True)
"""
    done = python(code)
    assert done.stdout.split() == ["inside"]
    assert done.returncode < 0


class Careless(Target):
    """Raises the wrong thing, and remembers what it heard."""

    def __init__(self) -> None:
        self.places = opened(Case("efsign", "decode")).places

    def hears(self, place: object, message: torch.Tensor, *, at_end: bool = True) -> torch.Tensor:
        raise IndexError("beyond")

    def spoilt(self) -> str:
        return "it remembers"


def test_any_other_exception_is_a_crash() -> None:
    tally = Tally()
    tally.attack(Careless(), Case("careless", "decode"), 3, random.Random(0))
    assert (tally.messages, tally.decoded, tally.refused) == (3, 0, 0)
    assert len(tally.crashes) == 4
    assert "IndexError('beyond')" in tally.crashes[0]
    assert tally.crashes[-1] == "careless by decode: it remembers"
