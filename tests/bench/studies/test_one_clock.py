"""One clock: committed simulated runs share compute times, and recomputed times are right."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.bench.records.files import files_in, read
from gradwire.bench.records.schema import KernelRecord, Point, TrainRecord
from gradwire.bench.studies.one_clock import (
    Codec,
    clock_key,
    is_local,
    kernel_codec,
    key_of,
    rewrite,
    with_one_clock,
)

RESULTS = Path(__file__).parents[3] / "results"


def run(spec: str, step_ms: float, **others: object) -> TrainRecord:
    points = tuple(
        Point(step=n, time_s=n * step_ms / 1e3, loss=1.0, sent_bytes=n * 1e6) for n in (0, 5, 10)
    )
    return replace(
        TrainRecord(
            spec=spec,
            workload="MLP",
            workload_spec="mlp",
            workers=8,
            rate="1gbit",
            shaped=True,
            seed=0,
            status="done",
            command="",
            machine={"cpu": "x"},
            points=points,
            step_ms=step_ms,
            compute_ms=10.0,
            simulated=True,
        ),
        **others,  # type: ignore[arg-type]
    )


def test_committed_runs_of_a_workload_and_device_have_one_compute_time() -> None:
    times: dict[object, set[float]] = {}
    for record in read(files_in([RESULTS / "studies", RESULTS / "adaptive"])):
        if isinstance(record, TrainRecord) and record.simulated and record.compute_ms:
            times.setdefault(key_of(record), set()).add(record.compute_ms)
    assert times
    assert {key: found for key, found in times.items() if len(found) > 1} == {}


def test_settings_without_effect_on_computation_share_a_clock() -> None:
    keys = [clock_key(w, "cpu", {}) for w in ("mlp", "mlp:learning_rate=3", "mlp:batch_size=8")]
    assert keys[0] == keys[1] != keys[2]


def test_a_step_without_overlap_changes_by_the_computation() -> None:
    old = run("none", 30.0, encode_ms=5.0, wire_ms=10.0, decode_ms=5.0)
    new = with_one_clock(old, 14.0)
    assert new.step_ms == pytest.approx(34)
    assert [p.time_s for p in new.points] == pytest.approx([0, 0.17, 0.34])
    assert with_one_clock(old, 10.0) == replace(old, scaling_efficiency=10 / 30)


def test_overlap_of_a_long_exchange_grows_with_the_computation() -> None:
    # 10 ms of computation and 40 ms on the wire in 44 ms: 6 ms overlap, then 12 ms.
    old = run("none", 44.0, encode_ms=0.0, wire_ms=40.0, decode_ms=0.0)
    assert with_one_clock(old, 20.0).step_ms == pytest.approx(20 + 40 - 12)


def test_a_local_method_pays_for_encoding_and_decoding() -> None:
    old = run("topk:ratio=0.01 @ local=(qsparse:sync_every=5)", 12.0)
    new = with_one_clock(old, 10.0, Codec(1.0, 0.5))
    assert new.step_ms == pytest.approx(13.5)
    assert (new.encode_ms, new.decode_ms) == (1.0, 0.5)


def test_rewriting_twice_changes_nothing_more(tmp_path: Path) -> None:
    from gradwire.bench.records.files import append

    path = tmp_path / "runs.jsonl"
    append(path, run("none", 30.0, wire_ms=20.0))
    append(path, run("efsign", 16.0, compute_ms=14.0, wire_ms=2.0))
    assert [found.changed for found in rewrite([path], [])] == [2]
    records = [r for r in read([path]) if isinstance(r, TrainRecord)]
    assert [r.compute_ms for r in records] == [12.0, 12.0]
    assert [r.step_ms for r in records] == pytest.approx([32.0, 14.0])
    assert [found.changed for found in rewrite([path], [])] == [0]


def kernel(spec: str, numel: int, us: float, device: str = "NVIDIA H200") -> KernelRecord:
    return KernelRecord(
        method=spec.partition(":")[0],
        spec=spec,
        device=device,
        backend="triton",
        numel=numel,
        encode_us=us,
        decode_us=us,
        decode8_us=2 * us,
        ef_step_us=us,
        payload_bytes=1,
        bits_per_element=1.0,
        floor_us=1.0,
        ratio_to_floor=1.0,
        command="",
        machine={"cpu": "x"},
    )


def test_codec_times_come_from_the_same_method_settings_and_device() -> None:
    sizes = ((1_000_000, 1000.0), (3_000_000, 3000.0))
    kernels = [kernel("qsgd", numel, us) for numel, us in sizes]

    def codec(spec: str, device: str = "cuda", gpu: str = "NVIDIA H200") -> Codec | None:
        found = run(f"{spec} @ local=(qsparse:sync_every=4)", 12.0, parameters=2_000_000)
        machine = {"cpu": "x"} if device == "cpu" else {"cpu": "x", "gpu": gpu}
        return kernel_codec(replace(found, device=device, machine=machine), kernels)

    # 2 ms to encode and 4 ms to decode eight messages, once in four steps.
    assert codec("qsgd:bits=4") == pytest.approx((0.5, 1.0))
    assert codec("qsgd:bits=8") is None
    assert codec("topk:ratio=0.01 | qsgd:bits=4") is None
    assert codec("qsgd:bits=4", gpu="NVIDIA A100") is None
    assert codec("qsgd:bits=4", device="cpu") is None


def test_committed_local_runs_on_a_gpu_pay_for_codecs_that_were_measured() -> None:
    kernels = [r for r in read([RESULTS / "kernels-h200.jsonl"]) if isinstance(r, KernelRecord)]
    paid = 0
    for record in read(files_in([RESULTS / "studies", RESULTS / "adaptive"])):
        if isinstance(record, TrainRecord) and record.simulated and is_local(record):
            codec = kernel_codec(record, kernels)
            assert (record.encode_ms, record.decode_ms) == (codec or (None, None))
            paid += codec is not None
    assert paid
