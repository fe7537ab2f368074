"""Kernels in several threads: the same bits as in one, whatever the slices."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from threading import Barrier, get_ident

import pytest
import torch
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels.cpu import jit, threads
from gradwire.kernels.cpu import rounding as rounding_kernels
from gradwire.kernels.specs import RoundingSpec
from gradwire.types import EFInput
from odd import normal, same_bits
from quantiser_checks import KEY, RULES, beside

pytestmark = pytest.mark.skipif(
    threads._torch_threads() is None, reason="torch has no threads of GNU OpenMP here"
)

SLICE = 3000
SIZES = [1, 2999, 3001, 8193, 24_577, 50_021]
DECAY = 0.75

Kernel = Callable[[Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Slices are short, and every loop is worth threads; how many were started each time."""
    started: list[int] = []
    start, usual = threads._torch_threads(), torch.get_num_threads()
    assert start is not None

    def counted(*args: object) -> None:
        started.append(int(str(args[2])))
        start(*args)

    monkeypatch.setattr(threads, "_torch_threads", lambda: counted)
    monkeypatch.setattr(threads, "SLICE", SLICE)
    monkeypatch.setattr(threads, "ENOUGH", 1)
    monkeypatch.setattr(threads, "EACH", 1)
    yield started
    torch.set_num_threads(usual)


def told(kernel: Callable[..., tuple[Tensor, ...]], *args: object) -> Kernel:
    """A kernel without a residual."""
    return lambda x: list(kernel(x, *args))


def with_residual(kernel: Callable[..., tuple[Tensor, ...]], *args: object) -> Kernel:
    """The same with one: apart from what is left, which holds NaN before, and in its place."""

    def call(x: Tensor) -> list[Tensor]:
        residual, residual_out = beside(x), torch.full_like(x, torch.nan)
        one = kernel(x, residual, DECAY, residual_out, *args)
        return [*one, residual_out, *kernel(x, residual, DECAY, residual, *args), residual]

    return call


def added(
    pack: Callable[..., tuple[Tensor, ...]], add: Callable[..., None], *args: object
) -> Kernel:
    """Three messages added up."""

    def call(x: Tensor) -> list[Tensor]:
        # The message itself by one thread, so that only the adding differs.
        many = torch.get_num_threads()
        torch.set_num_threads(1)
        rows = [torch.stack([a, b, a]) for a, b in zip(pack(x), pack(-x), strict=True)]
        torch.set_num_threads(many)
        out = beside(x)
        add(out, *rows, 1 / 3, *args)
        return [out]

    return call


def chosen(kernel: Callable[..., Tensor], *args: object) -> Kernel:
    """What is chosen, of x and of x with its residual."""

    def call(x: Tensor) -> list[Tensor]:
        residual_out = torch.full_like(x, torch.nan)
        return [
            kernel(EFInput(x), *args),
            kernel(EFInput(x, beside(x), residual_out, DECAY), *args),
            residual_out,
        ]

    return call


def factors(x: Tensor) -> list[Tensor]:
    """All products of a matrix and thin factors, at two shapes."""
    results: list[Tensor] = []
    for cols in (37, 2100):
        m = x[: x.numel() // cols * cols].view(-1, cols)
        p, q = normal(len(m) * 3).view(-1, 3), normal(cols * 3).view(-1, 3)
        less, out = m.clone(), torch.full_like(m, torch.nan)
        cpu.lessen(less, p, q)
        cpu.outer(out, p, q)
        results += [cpu.factor(m, q, False), cpu.factor(m, p, True), less, out]
    return results


def rounding(rule: RoundingSpec) -> Kernel:
    one, two = told(cpu.round_pack, rule, KEY), with_residual(cpu.round_pack_sum, rule, KEY)
    three = added(lambda x: cpu.round_pack(x, rule, KEY), cpu.round_add, rule)
    return lambda x: [*one(x), *two(x), *three(x)]


KERNELS: dict[str, Kernel] = {
    "sign": told(cpu.sign_pack),
    "sign with residual": with_residual(cpu.sign_pack_sum),
    "sign added": added(cpu.sign_pack, cpu.sign_add),
    "votes": told(cpu.votes_pack, KEY),
    "trits": told(cpu.trits_pack, 0.0, KEY),
    "trits, clipped": told(cpu.trits_pack, 2.5, KEY),
    "trits added": added(lambda x: cpu.trits_pack(x, 0.0, KEY), cpu.trits_add),
    "largest": chosen(cpu.largest, 200),
    "many largest": chosen(cpu.largest, 4000),
    "reaching": chosen(cpu.reaching, torch.tensor([1.9])),
    "sampled border": chosen(cpu.sampled_border, KEY, 500, 5, 40),
    "bisected border": chosen(cpu.bisected_border, 40),
    "excess border": chosen(cpu.excess_border, [0.25, 0.2]),
    "normal border": chosen(cpu.normal_border, 2.0, 40, 5),
    "factors": factors,
}
for bucket in (1, 77, 2048, 7000):
    KERNELS[f"sides of {bucket}"] = told(cpu.sides_pack, bucket)
    KERNELS[f"sides of {bucket} with residual"] = with_residual(cpu.sides_pack_sum, bucket)
    KERNELS[f"sides of {bucket} added"] = added(
        partial(cpu.sides_pack, bucket=bucket), cpu.sides_add, bucket
    )
for rule in RULES:
    KERNELS[str(rule)] = rounding(rule)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_same_bits_with_any_number_of_threads(name: str, numel: int, starts: list[int]) -> None:
    # With zeros, of which votes are drawn.
    x = normal(numel, seed=3) * (torch.arange(numel) % 5 != 3)
    torch.set_num_threads(1)
    expected = KERNELS[name](x)
    assert not starts, "one thread starts no others"
    for count in (2, 3):
        torch.set_num_threads(count)
        results = KERNELS[name](x)
        for found, wanted in zip(results, expected, strict=True):
            assert same_bits(found, wanted)
        # Of few entries there may be one slice, or nothing to do.
        assert set(starts) == {count} or numel < 20_000, "the threads that were asked for"
        starts.clear()


class TestSlices:
    def test_in_order_without_gaps_and_at_multiples(self) -> None:
        torch.set_num_threads(2)
        slices = threads.in_slices(lambda start, stop: (start, stop), 50_021, 77)
        assert len(slices) >= 50_021 // SLICE
        assert slices[0][0] == 0
        assert slices[-1][1] == 50_021
        assert all(one[1] == two[0] for one, two in pairwise(slices))
        assert all(start % 77 == 0 for start, _ in slices)

    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_no_two_slices_write_to_one_byte(
        self, rule: RoundingSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begins: list[int] = []

        def noted(loop: Callable[[int, int], None], size: int, unit: int, effort: int) -> None:
            torch.set_num_threads(2)
            threads.in_slices(lambda start, stop: begins.append(start), size, unit, effort)

        monkeypatch.setattr(rounding_kernels, "in_slices", noted)
        cpu.round_pack(normal(50_021), rule, KEY)
        assert len(set(begins)) > 2
        assert all(begin * rule.width % 8 == 0 for begin in begins)

    def test_several_threads_at_once_and_the_caller_is_one(self) -> None:
        torch.set_num_threads(3)
        # Passed only by three together; each has one slice.
        together = Barrier(3, timeout=20)

        def loop(start: int, stop: int) -> int:
            together.wait()
            return get_ident()

        assert len(found := set(threads.in_slices(loop, 3 * SLICE))) == 3
        assert get_ident() in found

    def test_few_entries_are_left_to_the_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(2)
        monkeypatch.setattr(threads, "ENOUGH", 2000)
        assert len(threads.in_slices(lambda start, stop: start, 1999)) == 1
        assert len(threads.in_slices(lambda start, stop: start, 2000)) > 1
        assert len(threads.in_slices(lambda start, stop: start, 1999, effort=2)) > 1
        monkeypatch.setattr(threads, "EACH", 1001)
        assert len(threads.in_slices(lambda start, stop: start, 2000)) == 1

    def test_so_is_what_cannot_be_cut(self, starts: list[int]) -> None:
        torch.set_num_threads(2)
        assert threads.in_slices(lambda start, stop: stop, 50_021, 60_000) == [50_021]
        assert not starts

    def test_so_is_all_where_torch_has_other_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(2)
        monkeypatch.setattr(threads, "_torch_threads", lambda: None)
        assert threads.in_slices(lambda start, stop: stop, 50_021) == [50_021]


@pytest.mark.parametrize("bad", ["first", "last", "all"])
def test_what_a_slice_raises_reaches_the_caller(bad: str) -> None:
    torch.set_num_threads(2)
    running: list[int] = []

    def loop(start: int, stop: int) -> None:
        running.append(start)
        time.sleep(0.01)
        running.pop()
        if bad == "all" or (start == 0 if bad == "first" else stop == 50_021):
            raise ValueError(f"in the slice {bad}")

    with pytest.raises(ValueError, match=f"in the slice {bad}"):
        threads.in_slices(loop, 50_021)
    assert not running, "nobody writes any more"


def test_compiled_once_and_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    (tmp_path / "length_of_slice.py").write_text("def length(a, b):\n    return b - a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    length = jit.compiled(import_module("length_of_slice").length)
    with caplog.at_level("WARNING", "gradwire.kernels"):
        assert sum(threads.in_slices(length, 50_021)) == 50_021
    assert [record.args for record in caplog.records] == [("length",)]


def test_a_forked_process_works_alone(starts: list[int]) -> None:
    """Where OpenMP's threads are gone, and waiting for them would never end."""
    torch.set_num_threads(2)
    x = normal(20_000)
    bits, scale = cpu.sign_pack(x)
    assert starts
    with warnings.catch_warnings():
        # Python warns of just this.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        alike = False
        try:
            again = cpu.sign_pack(x)
            alike = same_bits(again[0], bits) and same_bits(again[1], scale)
        finally:
            os._exit(0 if alike else 1)
    assert _ended(child) == 0


def _ended(child: int, patience_s: float = 20.0) -> int:
    """How a process ended; one that hangs is killed."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")
