"""Records of any kind become tables."""

from dataclasses import replace
from pathlib import Path

from gradwire.bench.records.files import append, read_every
from gradwire.bench.records.schema import (
    ForecastRecord,
    GuardRecord,
    KernelRecord,
    Record,
    StepRecord,
    TrainRecord,
)
from pages import other_results, results

MACHINE = {"cpu": "Imaginary 9000", "cores": "2", "commit": "0123456789abcdef"}


def step(spec: str, step_ms: float) -> StepRecord:
    return StepRecord(
        spec=spec,
        workers=4,
        rate="1gbit",
        shaped=True,
        steps=9,
        batch=32,
        parameters=5_800_000,
        status="done",
        command="gradwire bench step --json /somewhere/x.jsonl --rate 1gbit",
        machine=MACHINE,
        step_ms=step_ms,
        sent_bytes=35e6,
        ratio_to_dense=step_ms / 100,
    )


def train(seed: int) -> TrainRecord:
    return TrainRecord(
        spec="efsign",
        workload="digits",
        workers=4,
        rate=None,
        shaped=False,
        seed=seed,
        status="done",
        command=f"gradwire bench train --seeds {seed}",
        machine=MACHINE,
        step_ms=20.0,
        final_loss=0.5,
    )


def kernel() -> KernelRecord:
    return KernelRecord(
        method="efsign",
        spec="efsign",
        device="cpu",
        backend="numba",
        numel=1000,
        encode_us=1.0,
        decode_us=2.0,
        decode8_us=3.0,
        ef_step_us=4.0,
        payload_bytes=129,
        bits_per_element=1.03,
        floor_us=2.0,
        ratio_to_floor=2.0,
        command="gradwire bench kernels",
        machine=MACHINE,
    )


def forecast(predicted: float, measured: float) -> ForecastRecord:
    return ForecastRecord(
        spec="topk:ratio=0.01",
        exchange="gather",
        workload="mlp",
        parameters=10,
        workers=8,
        rate="1gbit",
        latency_ms=0.1,
        device="cpu",
        command="gradwire bench validate",
        machine=MACHINE,
        step_ms=predicted,
        compute_ms=1.0,
        encode_ms=1.0,
        wire_ms=1.0,
        decode_ms=1.0,
        sent_bytes=1e6,
        calls=2,
        measured_ms=measured,
    )


def written(folder: Path, name: str, *records: Record | ForecastRecord) -> None:
    for record in records:
        append(folder / name, record)


def test_kernels_in_several_threads_are_a_setting_of_their_own(tmp_path: Path) -> None:
    written(tmp_path, "new.jsonl", kernel(), replace(kernel(), threads=2))
    headings = [line for line in results.tables(tmp_path).splitlines() if line.startswith("### ")]
    one = "### 1,000 elements on cpu, numba kernels"
    assert headings == [one, f"{one} in 2 threads"]


def test_a_file_is_a_section_and_a_setting_a_table(tmp_path: Path) -> None:
    written(tmp_path, "new.jsonl", kernel())
    written(tmp_path, "step.jsonl", step("ddp-fp32", 100.0), step("efsign", 50.0))
    written(tmp_path, "train/digits.jsonl", train(0), train(1))
    page = results.tables(tmp_path)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Time to accuracy: digits", "## Step times", "## new"]
    assert "### 5.80 M parameters, batch 32, 4 workers, links shaped to 1 Gbit/s" in page
    assert "| `efsign` | 50.0 ms |" in page
    assert "| 2.00× |" in page  # noqa: RUF001
    assert "links not shaped" in page
    assert "`gradwire bench train --seeds 0`  \n`gradwire bench train --seeds 1`  \ncpu" in page
    assert "commit 0123456789ab\n" in page


def test_commands_are_shown_without_local_paths(tmp_path: Path) -> None:
    written(tmp_path, "step.jsonl", step("ddp-fp32", 100.0))
    page = results.tables(tmp_path)
    assert "`gradwire bench step --rate 1gbit`" in page
    assert "somewhere" not in page
    assert (
        results.public("gradwire x --json=/a/b --case 'a @ b=c' -o /d")
        == "gradwire x --case 'a @ b=c'"
    )


def test_forecasts_beside_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path, "validation.jsonl", forecast(110, 100), forecast(150, 100))
    page = results.tables(tmp_path)
    assert (
        "1 of 2 predictions are within 15% of what was measured; half of them within 30%." in page
    )
    assert "| `topk:ratio=0.01` | 1 Gbit/s | 8 | 150 ms | 100 ms | +50% | 1.00 MB |" in page


def test_a_study_shows_where_runs_ended() -> None:
    common = {
        "workload": "gpt-tiny",
        "workers": 8,
        "seed": 0,
        "evaluation_loss": 1.0,
        "metric": 2.0,
    }
    rows = [
        {
            "case": "diloco",
            "step": step,
            "sent_bytes": 10 * step,
            "dense_bytes": 1000 * step,
            **common,
        }
        for step in (100, 200)
    ]
    page = "\n".join(other_results.tables(rows))
    assert "### gpt-tiny, 8 workers" in page
    assert "| `diloco` | 0 | 200 | 1.00 | 2.00 | 2.00 kB | 100× |" in page  # noqa: RUF001
    assert "| 100 |" not in page


def test_hostile_messages_are_summed_by_method() -> None:
    counts = {"messages": 10, "decoded": 4, "refused": 6, "crashes": 0}
    rows = [{"kind": "fuzz", "spec": spec, **counts} for spec in ("topk", "topk:ratio=0.1 | sign")]
    page = "\n".join(other_results.tables(rows))
    assert "20 hostile or broken messages to 2 settings of 1 methods" in page
    assert "| `topk` | 20 | 8 | 12 | 0 |" in page


def test_rows_of_an_unknown_form_are_shown() -> None:
    rows = [{"kind": "new", "name": "a", "good": True, "x": x, "deep": {}} for x in (1.0, 2.5)]
    summary, lines = other_results.plain(rows)
    assert summary == "name a, good yes."
    assert lines.splitlines() == ["| x |", "| --- |", "| 1.00 |", "| 2.50 |"]


def test_the_cost_of_guards_is_that_of_the_records() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "explanation" / "reliability.md").read_text("utf-8")
    found = read_every([root / "results" / "reliability" / "guards.jsonl"])
    assert len(found) == 4
    for record in found:
        assert isinstance(record, GuardRecord)
        low, high = record.quartiles
        row = (
            f"| `{record.spec}` | `{record.guard}` | {record.ratio:.3f} | {low:.3f} to {high:.3f} |"
        )
        assert row in page
