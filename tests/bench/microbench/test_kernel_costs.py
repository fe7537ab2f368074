"""The kernel bench measures every method of the catalogue and writes its records."""

import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from time import sleep
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import Tensor

from gradwire.bench.microbench.ef_step import ef_step
from gradwire.bench.microbench.kernels import KernelBench, usual_specs
from gradwire.bench.microbench.measure import OverLimit, Stopwatch, TimeLimit
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import KernelRecord
from gradwire.bench.report.figures import draw_svg
from gradwire.bench.report.plotdata import Axis, Bar, Bars, cut_at, ticks
from gradwire.bench.report.write import render
from gradwire.compressors.efsign import EFSign
from gradwire.errors import ConfigError
from gradwire.spec import methods, parse
from gradwire.types import EncodeContext, Parts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.bench.microbench.measure.BUDGET_S", 0.0)


def bench(path: Path | None, device: str = "cpu") -> KernelBench:
    return KernelBench(device, (4096,), tuple(usual_specs()), 1, path, "gradwire bench kernels")


@pytest.mark.usefixtures("quick")
def test_every_method_has_a_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    console = Console(width=120, record=True)
    bench(path).run(console)
    records = [r for r in read([path]) if isinstance(r, KernelRecord)]
    assert sorted({r.method for r in records}) == methods()
    for record in records:
        assert record.numel == 4096
        assert min(record.encode_us, record.decode_us, record.ef_step_us, record.floor_us) > 0
        assert record.bits_per_element == 8 * record.payload_bytes / record.numel
        assert record.ratio_to_floor == record.ef_step_us / record.floor_us
        assert (record.ef_step_by, record.ef_step_eager_us) == ("eager", record.ef_step_us)
        assert record.add_us
        assert record.ratio_to_add == record.ef_step_us / record.add_us
        assert (record.decode8_us is None) == (record.decode8_floor_us is None)
        assert set(record.machine) >= {"cpu", "torch", "numba", "triton", "commit"}
    assert "nearest to the memory-traffic floor" in console.export_text()
    page = render(records)
    assert all(record.spec in page for record in records)


def slow_encode(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[int]:
    """Makes efsign as slow as `seconds` of the size; returns the sizes that it will encode."""
    ran: list[int] = []
    original = EFSign.compress

    def compress(self: EFSign, x: Tensor, ctx: EncodeContext) -> Parts:
        ran.append(x.numel())
        sleep(seconds(x.numel()))
        return original(self, x, ctx)

    monkeypatch.setattr(EFSign, "compress", compress)
    return ran


def limited(numel: int, limit_s: float, path: Path) -> tuple[list[KernelRecord], str]:
    console = Console(width=200, record=True, file=StringIO())
    specs = ("efsign", "none")
    KernelBench(
        "cpu", (numel,), specs, 1, path, "c", path.with_suffix(".svg"), limit_s=limit_s
    ).run(console)
    return [r for r in read([path]) if isinstance(r, KernelRecord)], console.export_text()


@pytest.mark.usefixtures("quick")
def test_a_method_that_would_take_hours_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 2**21
    # About three hours at full size, by its growth.
    ran = slow_encode(monkeypatch, lambda size: 0.02 * (size / 2**15) ** 2)
    (over, done), text = limited(numel, 1.0, tmp_path / "kernels.jsonl")
    assert max(ran) < numel / 8
    assert (over.status, done.status) == ("interrupted", "done")
    assert (over.error or "").startswith("over 1 s: one encode would take about ")
    assert over.encode_us is None or math.isnan(over.encode_us)
    assert "over 1 s" in text
    assert "Over the time limit: efsign." in text
    assert "over 1 s" in render([over, done])


@pytest.mark.usefixtures("quick")
def test_what_was_measured_in_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_encode(monkeypatch, lambda size: 0.8)
    (over, done), text = limited(4096, 1.5, tmp_path / "kernels.jsonl")
    assert (over.status, done.status) == ("interrupted", "done")
    assert over.error == "over 1.5 s: not all was measured"
    assert over.payload_bytes > 0
    assert over.encode_us >= 0.8e6
    assert over.decode_us is None or math.isnan(over.decode_us)
    assert "over 1.5 s" in text


def test_near_the_limit_medians_have_fewer_calls_and_say_so() -> None:
    now_s = 0.0

    def call() -> None:
        nonlocal now_s
        now_s += 1.0

    class FakeWatch(Stopwatch):
        batch_us = 0.0

        def time_us(self, call: Callable[[], object], times: int) -> float:
            start_s = now_s
            call()
            return (now_s - start_s) * 1e6

    def clock() -> float:
        return now_s

    for limit_s, calls, shortened in ((2.0, 2, True), (5.5, 5, True), (100.0, 8, False)):
        now_s = 0.0
        limit = TimeLimit(limit_s, clock)
        assert FakeWatch().median_us(call, limit) == 1e6
        assert (now_s, limit.shortened) == (calls, shortened)
    limit = TimeLimit(0.0, clock)
    with pytest.raises(OverLimit):
        FakeWatch().median_us(call, limit)


def test_the_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="kernels: seconds must be positive, got 0"):
        KernelBench("cpu", (900,), ("none",), 1, None, "c", limit_s=0.0).run(Console())


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'tpu'"):
        bench(None, "tpu").run(Console())


@pytest.mark.usefixtures("quick")
def test_the_plot_has_a_chart_for_every_size(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.svg"
    specs = ("efsign", "powersgd:rank=4")
    KernelBench("cpu", (900, 2500), specs, 1, None, "c", path).run(Console(width=120, record=True))
    text = path.read_text()
    ElementTree.fromstring(text)
    for words in ("900 elements on cpu", "2,500 elements on cpu", "powersgd:rank=4", "efsign"):
        assert words in text
    assert text.count("Cost of a step over its floor") == 2
    assert text.count("Cost of a step over that of an addition") == 2
    # PowerSGD has no messages to add.
    assert text.count("Cost of adding up eight messages") == 2
    assert text.count(">powersgd:rank=4<") == 4


def test_a_plot_that_cannot_be_drawn_is_an_error_before_the_run(tmp_path: Path) -> None:
    bench = KernelBench("cpu", (900,), ("efsign",), 1, None, "c", tmp_path / "plot.png")
    with pytest.raises(ConfigError, match=r"plot: the file name must end in .svg, got .*plot.png"):
        bench.run(Console())


def test_long_bars_are_cut_and_keep_their_number() -> None:
    traces = [
        Bar(spec=s, label=s, segments=(), total=t) for s, t in (("a<b", 1.0), ("b", 1.2), ("c", 90))
    ]
    cut = cut_at([bar.total for bar in traces])
    axis = Axis(name="cost", label="times")
    text = draw_svg(
        [("here", Bars(place=1, title="t", caption="c", x=axis, traces=tuple(traces), cut=cut))]
    )
    assert cut == pytest.approx(3.6)
    assert text.count('class="gap"') == 2
    assert ">90.0<" in text
    assert "a&lt;b" in text
    assert cut_at([1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize(("most", "marks"), [(3.6, [0, 1, 2, 3]), (0.9, [0, 0.2, 0.4, 0.6, 0.8])])
def test_marks_are_round_numbers(most: float, marks: list[float]) -> None:
    assert ticks(most, 6) == pytest.approx(marks)


@pytest.mark.usefixtures("quick")
def test_a_method_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr("gradwire.compressors.efsign.EFSign.compress", out_of_memory)
    path, console = tmp_path / "kernels.jsonl", Console(width=200, record=True)
    KernelBench("cpu", (900,), ("efsign", "none"), 1, path, "c", tmp_path / "p.svg", "abc").run(
        console
    )
    failed, done = read([path])
    assert (failed.status, failed.error) == ("failed", "CUDA out of memory")
    assert done.status == "done"
    assert done.machine["commit"] == "abc"
    assert "Not measured: efsign." in console.export_text()
    assert "CUDA out of memory" in render([failed, done])


@pytest.mark.parametrize("spec", ["terngrad", "qsgd:bits=2", "efsign"])
def test_a_step_stays_finite(spec: str) -> None:
    """TernGrad's residual would grow without limit and overflow if it were kept."""
    x = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    call = ef_step(parse(spec), x, EncodeContext((30, 30)))
    for _ in range(300):
        parts = call()
    assert isinstance(parts, tuple)
    assert all(part.isfinite().all() for part in parts)


def test_records_without_newer_fields_are_read(tmp_path: Path) -> None:
    results = Path(__file__).parents[3] / "results" / "kernels-h200.jsonl"
    row = json.loads(results.read_text().splitlines()[0])
    row.pop("add_us", None)
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    [record] = read([tmp_path / "old.jsonl"])
    assert isinstance(record, KernelRecord)
    assert record.add_us is None
