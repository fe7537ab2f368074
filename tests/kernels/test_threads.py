"""Kernels give the same bits in several threads as in one, whatever the slices."""

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

from deadlines import scaled
from gradwire.kernels import cpu
from gradwire.kernels.cpu import jit, threads
from gradwire.kernels.cpu import rounding as rounding_kernels
from gradwire.kernels.specs import RoundingSpec
from gradwire.types import EFInput
from odd import normal, same_bits
from quantizer_checks import KEY, ROUNDINGS, beside

pytestmark = pytest.mark.skipif(
    threads._torch_threads() is None, reason="torch has no threads of GNU OpenMP here"
)

SLICE = 3000
SIZES = [1, 2999, 3001, 8193, 24_577, 50_021]
DECAY = 0.75

Kernel = Callable[[Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Makes slices short and threads always worthwhile; yields the threads started per loop."""
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


def plain(kernel: Callable[..., tuple[Tensor, ...]], *args: object) -> Kernel:
    """Calls a kernel without a residual."""
    return lambda x: list(kernel(x, *args))


def with_residual(kernel: Callable[..., tuple[Tensor, ...]], *args: object) -> Kernel:
    """Calls a kernel with a residual: with a `residual_out` of NaN, and in place."""

    def call(x: Tensor) -> list[Tensor]:
        residual, residual_out = beside(x), torch.full_like(x, torch.nan)
        one = kernel(x, residual, DECAY, residual_out, *args)
        return [*one, residual_out, *kernel(x, residual, DECAY, residual, *args), residual]

    return call


def added(
    pack: Callable[..., tuple[Tensor, ...]], add: Callable[..., None], *args: object
) -> Kernel:
    """Adds up three messages."""

    def call(x: Tensor) -> list[Tensor]:
        # Messages are made by one thread, so that only the addition differs.
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        rows = [torch.stack([a, b, a]) for a, b in zip(pack(x), pack(-x), strict=True)]
        torch.set_num_threads(usual)
        out = beside(x)
        add(out, *rows, 1 / 3, *args)
        return [out]

    return call


def selected(kernel: Callable[..., Tensor], *args: object) -> Kernel:
    """Selects from x and from x with its residual."""

    def call(x: Tensor) -> list[Tensor]:
        residual_out = torch.full_like(x, torch.nan)
        return [
            kernel(EFInput(x), *args),
            kernel(EFInput(x, beside(x), residual_out, DECAY), *args),
            residual_out,
        ]

    return call


def factors(x: Tensor) -> list[Tensor]:
    """Computes all products of a matrix and low-rank factors, at two shapes."""
    results: list[Tensor] = []
    for cols in (37, 2100):
        m = x[: x.numel() // cols * cols].view(-1, cols)
        p, q = normal(len(m) * 3).view(-1, 3), normal(cols * 3).view(-1, 3)
        rest, out = m.clone(), torch.full_like(m, torch.nan)
        cpu.subtract_low_rank(rest, p, q)
        cpu.outer(out, p, q)
        results += [cpu.factor(m, q, False), cpu.factor(m, p, True), rest, out]
    return results


def rounding(spec: RoundingSpec) -> Kernel:
    one, two = plain(cpu.round_pack, spec, KEY), with_residual(cpu.round_pack_sum, spec, KEY)
    three = added(lambda x: cpu.round_pack(x, spec, KEY), cpu.round_add, spec)
    return lambda x: [*one(x), *two(x), *three(x)]


KERNELS: dict[str, Kernel] = {
    "uniform": lambda x: [cpu.uniform(KEY, x.numel(), x.device)],
    "sign": plain(cpu.sign_pack),
    "sign with residual": with_residual(cpu.sign_pack_sum),
    "sign added": added(cpu.sign_pack, cpu.sign_add),
    "votes": plain(cpu.sign_votes_pack, KEY),
    "trits": plain(cpu.trits_pack, 0.0, KEY),
    "trits, clipped": plain(cpu.trits_pack, 2.5, KEY),
    "trits added": added(lambda x: cpu.trits_pack(x, 0.0, KEY), cpu.trits_add),
    "largest": selected(cpu.select_largest, 200),
    "many largest": selected(cpu.select_largest, 4000),
    "above": selected(cpu.select_above, torch.tensor([1.9])),
    "sampled threshold": selected(cpu.sampled_threshold, KEY, 500, 5, 40),
    "bisected threshold": selected(cpu.bisected_threshold, 40),
    "excess threshold": selected(cpu.excess_threshold, [0.25, 0.2]),
    "normal threshold": selected(cpu.normal_threshold, 2.0, 40, 5),
    "factors": factors,
}
for bucket in (1, 77, 2048, 7000):
    KERNELS[f"two means of {bucket}"] = plain(cpu.sign_means_pack, bucket)
    KERNELS[f"two means of {bucket} with residual"] = with_residual(cpu.sign_means_pack_sum, bucket)
    KERNELS[f"two means of {bucket} added"] = added(
        partial(cpu.sign_means_pack, bucket=bucket), cpu.sign_means_add, bucket
    )
for spec in ROUNDINGS:
    KERNELS[str(spec)] = rounding(spec)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_same_bits_with_any_number_of_threads(name: str, numel: int, starts: list[int]) -> None:
    # With zeros, whose votes are random.
    x = normal(numel, seed=3) * (torch.arange(numel) % 5 != 3)
    torch.set_num_threads(1)
    expected = KERNELS[name](x)
    assert not starts, "one thread starts no others"
    for count in (2, 3):
        torch.set_num_threads(count)
        results = KERNELS[name](x)
        for found, wanted in zip(results, expected, strict=True):
            assert same_bits(found, wanted)
        # Few entries may be a single slice.
        assert set(starts) == {count} or numel < 20_000, "the threads requested"
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

    @pytest.mark.parametrize("spec", ROUNDINGS, ids=str)
    def test_no_two_slices_write_to_one_byte(
        self, spec: RoundingSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begins: list[int] = []

        def record(loop: Callable[[int, int], None], size: int, unit: int, effort: int) -> None:
            torch.set_num_threads(2)
            threads.in_slices(lambda start, stop: begins.append(start), size, unit, effort)

        monkeypatch.setattr(rounding_kernels, "in_slices", record)
        cpu.round_pack(normal(50_021), spec, KEY)
        assert len(set(begins)) > 2
        assert all(begin * spec.width % 8 == 0 for begin in begins)

    def test_several_threads_at_once_and_the_caller_is_one(self) -> None:
        torch.set_num_threads(3)
        # Three threads are needed to pass it; each has one slice.
        together = Barrier(3, timeout=scaled(20))

        def loop(start: int, stop: int) -> int:
            together.wait()
            return get_ident()

        assert len(found := set(threads.in_slices(loop, 3 * SLICE))) == 3
        assert get_ident() in found

    def test_few_entries_are_processed_by_the_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(2)
        monkeypatch.setattr(threads, "ENOUGH", 2000)
        assert len(threads.in_slices(lambda start, stop: start, 1999)) == 1
        assert len(threads.in_slices(lambda start, stop: start, 2000)) > 1
        assert len(threads.in_slices(lambda start, stop: start, 1999, effort=2)) > 1
        monkeypatch.setattr(threads, "EACH", 1001)
        assert len(threads.in_slices(lambda start, stop: start, 2000)) == 1

    def test_one_slice_is_processed_by_the_caller(self, starts: list[int]) -> None:
        torch.set_num_threads(2)
        assert threads.in_slices(lambda start, stop: stop, 50_021, 60_000) == [50_021]
        assert not starts

    def test_the_caller_does_all_without_gnu_openmp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(2)
        monkeypatch.setattr(threads, "_torch_threads", lambda: None)
        assert threads.in_slices(lambda start, stop: stop, 50_021) == [50_021]


@pytest.mark.parametrize("bad", ["first", "last", "all"])
def test_an_exception_of_a_slice_reaches_the_caller(bad: str) -> None:
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
    assert not running, "all threads have ended"


def test_compiled_once_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    (tmp_path / "length_of_slice.py").write_text("def length(a, b):\n    return b - a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    length = jit.compiled(import_module("length_of_slice").length)
    with caplog.at_level("DEBUG", "gradwire.kernels"):
        assert sum(threads.in_slices(length, 50_021)) == 50_021
    compiled = [record.args for record in caplog.records if record.levelname == "DEBUG"]
    assert compiled == [("length",)]


def test_a_forked_process_works_alone(starts: list[int]) -> None:
    """OpenMP's threads are gone there, and waiting for them would never end."""
    torch.set_num_threads(2)
    x = normal(20_000)
    bits, scale = cpu.sign_pack(x)
    assert starts
    with warnings.catch_warnings():
        # Python warns of fork() with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        equal = False
        try:
            again = cpu.sign_pack(x)
            equal = same_bits(again[0], bits) and same_bits(again[1], scale)
        finally:
            os._exit(0 if equal else 1)
    assert _ended(child) == 0


def _ended(child: int, patience_s: float = 20.0) -> int:
    """Returns the exit code of a process; kills it if it hangs."""
    deadline = time.monotonic() + scaled(patience_s)
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")
