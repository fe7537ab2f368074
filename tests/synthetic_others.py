"""Plausible records other than runs, one or a few of every kind; no number was measured."""

from gradwire.bench.case import Change
from gradwire.bench.records.schema import (
    CampaignRecord,
    ElasticRecord,
    FaultRecord,
    FollowRecord,
    ForecastRecord,
    FuzzRecord,
    GuardRecord,
    KerasRecord,
    LevelsRecord,
    OtherRecord,
    OverheadRecord,
    Phase,
)
from synthetic_runs import MACHINE


def follow(spec: str, slow_ms: float, setting: str | None = None) -> FollowRecord:
    """Returns a case on links that become slow for a while."""
    rates = (("1gbit", 100.0), ("50mbit", slow_ms), ("1gbit", 100.0))
    return FollowRecord(
        spec=spec,
        workload="mlp",
        workers=4,
        phases=tuple(
            Phase(
                rate=rate,
                first=40 * i,
                steps=40,
                seconds=0.04 * step_ms,
                settled_ms=step_ms,
                setting=setting,
            )
            for i, (rate, step_ms) in enumerate(rates)
        ),
        timeline=() if setting is None else (Change(0, setting, "as <it> is"),),
        command="python -m gradwire.bench.runs.changing_link",
        machine=MACHINE,
    )


def forecast(spec: str, workers: int, measured_ms: float | None = None) -> ForecastRecord:
    return ForecastRecord(
        spec=spec,
        exchange="mean",
        workload="a small model",
        parameters=1_000_000,
        workers=workers,
        rate="1gbit",
        latency_ms=0.1,
        device="cpu",
        command="gradwire simulate",
        machine=MACHINE,
        step_ms=100.0 + workers,
        compute_ms=30.0,
        encode_ms=5.0,
        wire_ms=60.0 + workers,
        decode_ms=5.0,
        sent_bytes=4e6,
        calls=1.0,
        measured_ms=measured_ms,
    )


def levels(spec: str, numel: int, ratio: float) -> LevelsRecord:
    return LevelsRecord(
        spec=spec,
        factors=(10.0, 1000.0),
        device="cpu",
        backend="numba",
        numel=numel,
        two_levels_us=2000.0,
        twice_us=2000.0 * ratio,
        ratio=ratio,
        by="eager",
        command="gradwire bench kernels --levels 10,1000",
        machine=MACHINE,
    )


def overhead(integration: str, ratio: float) -> OverheadRecord:
    return OverheadRecord(
        integration=integration,
        workers=2,
        device="cpu",
        width=1024,
        compared=200,
        plain_ms=10.0,
        none_ms=10.0 * ratio,
        ratio=ratio,
        quartiles=(ratio - 0.02, ratio + 0.02),
        limit=1.03,
        command="gradwire bench integrations",
        machine=MACHINE,
    )


def guard(spec: str, ratio: float) -> GuardRecord:
    return GuardRecord(
        spec=spec,
        guard="checksum",
        workers=4,
        rate="1gbit",
        shaped=True,
        workload="mlp",
        rounds=20,
        steps=5,
        without_ms=100.0,
        with_ms=100.0 * ratio,
        ratio=ratio,
        quartiles=(ratio - 0.05, ratio + 0.05),
        limit=1.03,
        command="gradwire bench guards",
        machine=MACHINE,
    )


def fuzz(spec: str, *crash_texts: str) -> FuzzRecord:
    return FuzzRecord(
        spec=spec,
        ways=("decode", "gather"),
        messages=4000,
        decoded=1500,
        refused=2500 - len(crash_texts),
        crashes=len(crash_texts),
        crash_texts=crash_texts,
        cpu_s=1.5,
        peak_grown_kb=0,
        seed=1,
        command="gradwire bench fuzz",
        machine=MACHINE,
    )


def fault(phase: str, detected_s: float, as_expected: bool = True) -> FaultRecord:
    return FaultRecord(
        number=0,
        job="ddp",
        fault="kill",
        phase=phase,
        rank=1,
        step=5,
        resumed_from=4,
        detected_s=detected_s,
        errors={"PeerError": 3},
        hung=0,
        as_expected=as_expected,
        lost_checkpoints=0,
        threads_left=0,
    )


def campaign(wrong_losses: int = 0) -> CampaignRecord:
    return CampaignRecord(
        job="ddp",
        spec="topk:ratio=0.1",
        faults=2,
        seed=0,
        workers=4,
        rate="100mbit",
        timeout_s=6.0,
        hung=0,
        unexpected=0,
        lost_checkpoints=0,
        wrong_losses=wrong_losses,
        same_weights=True,
        max_detected_s=2.5,
        took_s=12.0,
        command="gradwire bench faults",
        machine=MACHINE,
    )


def elastic(spec: str, wrong_steps: int = 0) -> ElasticRecord:
    return ElasticRecord(
        spec=spec,
        replicas=4,
        kills=3,
        hit_member=(True, True, False),
        survived=3,
        hung=False,
        unexpected=(),
        repeated_steps=0,
        steps=1200,
        compared=3000,
        wrong_steps=wrong_steps,
        rollbacks=9,
        recovery_s=(1.0, 1.5, 0.5),
        rejoin_s=(1.0, 1.0),
        first_loss=2.3,
        last_loss=1.1,
        sent_bytes=14088.0,
        join_timeout_ms=2000,
        heartbeat_timeout_ms=1000,
        seed=0,
        took_s=60.0,
        command="gradwire bench elastic",
        machine=MACHINE,
    )


def keras(spec: str, step_ms: float) -> KerasRecord:
    return KerasRecord(
        spec=spec,
        step_ms=step_ms,
        ratio=step_ms / 50,
        sent_bytes=None,
        against="by hand",
        workers=2,
        rate=None,
        steps=20,
        hidden=2048,
        batch=32,
        tensorflow="2.20.0",
        machine=MACHINE,
    )


def others() -> list[OtherRecord]:
    """Returns records of every kind."""
    return [
        follow("none", 2000.0),
        follow("topk:ratio=0.01 @ controller=autopilot", 180.0, "bf16 (1), topk:ratio=0.01 (1)"),
        *(forecast(spec, workers) for spec in ("ddp-fp32", "sign") for workers in (2, 8)),
        levels("topk", 1_000_000, 1.25),
        levels("randomk", 1_000_000, 0.96),
        keras("by hand", 50.0),
        keras("none", 55.0),
        guard("topk:ratio=0.01", 1.01),
        guard("efsign", 1.05),
        overhead("ddp", 1.01),
        overhead("fsdp", 1.05),
        fuzz("acpsgd"),
        fuzz("adaq:ratio=0.3"),
        fault("wire", 1.5),
        fault("save", 2.5),
        campaign(),
        elastic("topk:ratio=0.01"),
    ]
