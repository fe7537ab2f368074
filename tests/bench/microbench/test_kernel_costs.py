"""The kernel bench measures every method of the catalogue and writes its records."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from gradwire.bench.microbench.ef_step import ef_step
from gradwire.bench.microbench.kernels import KernelBench, usual_specs
from gradwire.bench.records.files import read
from gradwire.bench.records.schema import KernelRecord
from gradwire.bench.report.figures import draw_svg
from gradwire.bench.report.plotdata import Axis, Bar, Bars, cut_at, ticks
from gradwire.bench.report.write import render
from gradwire.errors import ConfigError
from gradwire.spec import methods, parse
from gradwire.types import EncodeContext


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
