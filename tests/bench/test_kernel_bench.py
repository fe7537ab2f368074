"""The kernel bench measures every method of the folder and keeps its records."""

from pathlib import Path

import pytest
from rich.console import Console

from laconic.bench.kernel_bench import KernelBench, usual_specs
from laconic.bench.records import KernelRecord, read
from laconic.bench.report import render
from laconic.errors import ConfigError
from laconic.spec import methods


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.bench.stopwatch.BUDGET_S", 0.0)


def bench(path: Path | None, device: str = "cpu") -> KernelBench:
    return KernelBench(device, (4096,), tuple(usual_specs()), 1, path, "laconic bench kernels")


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
    assert "nearest to the speed of memory" in console.export_text()
    page = render(records)
    assert all(record.spec in page for record in records)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'tpu'"):
        bench(None, "tpu").run(Console())
