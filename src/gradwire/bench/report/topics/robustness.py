"""Sections on robustness: costs of guards and integrations, fuzzed messages, injected faults."""

from collections.abc import Sequence
from statistics import median

from gradwire.bench import human
from gradwire.bench.records.compare import Links, group
from gradwire.bench.records.schema import (
    AnyRecord,
    CampaignRecord,
    ElasticRecord,
    FaultRecord,
    FuzzRecord,
    GuardRecord,
    OverheadRecord,
)
from gradwire.bench.report.grid import Cell
from gradwire.bench.report.section import (
    Section,
    count,
    grid_of,
    ms,
    ratio,
    seconds,
    text_cell,
    yes_cell,
)


def guard_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per workload and cluster."""
    found = (record for record in records if isinstance(record, GuardRecord))
    settings = group(found, lambda r: (r.workload, Links(r.workers, r.rate, r.shaped)))
    return [
        _guard_section(f"{name}, {links.words()}", rows) for (name, links), rows in settings.items()
    ]


def _guard_section(setting: str, records: Sequence[GuardRecord]) -> Section:
    within = [record.ratio <= record.limit for record in records]
    columns = {
        "method": [text_cell(r.spec) for r in records],
        "guard": [text_cell(r.guard) for r in records],
        "rounds": [count(r.rounds) for r in records],
        "without": [ms(r.without_ms) for r in records],
        "with": [ms(r.with_ms) for r in records],
        "ratio": [ratio(r.ratio, 3) for r in records],
        "quartiles": [_quartiles(r) for r in records],
        "limit": [ratio(r.limit) for r in records],
        "status": [text_cell("within" if fine else "over") for fine in within],
    }
    return Section(
        f"Cost of guards: {setting}",
        f"{sum(within)} of {len(records)} measurements are within their limit, which holds for the "
        "median over rounds of the ratio of a step with the guard to one without.",
        grid_of(columns, within),
    )


def overhead_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per number of workers, device and model."""
    found = (record for record in records if isinstance(record, OverheadRecord))
    settings = group(found, lambda r: (r.workers, r.device, r.width))
    return [_overhead_section(rows) for rows in settings.values()]


def _overhead_section(records: Sequence[OverheadRecord]) -> Section:
    one, within = records[0], [record.ratio <= record.limit for record in records]
    columns = {
        "integration": [text_cell(r.integration) for r in records],
        "compared": [count(r.compared) for r in records],
        "without": [ms(r.plain_ms) for r in records],
        "with none": [ms(r.none_ms) for r in records],
        "ratio": [ratio(r.ratio, 3) for r in records],
        "quartiles": [_quartiles(r) for r in records],
        "limit": [ratio(r.limit) for r in records],
        "status": [text_cell("within" if fine else "over") for fine in within],
    }
    return Section(
        f"Cost of integrations: layers of {one.width:,}, {one.workers} workers, {one.device}",
        f"{sum(within)} of {len(records)} integrations are within their limit, which holds for the "
        "median ratio of neighbouring steps, or runs of a trainer, with Gradwire's none to those "
        "without it.",
        grid_of(columns, within),
    )


def _quartiles(record: GuardRecord | OverheadRecord) -> Cell:
    low, high = record.quartiles
    return Cell(f"{low:.3f} – {high:.3f}", high - low)  # noqa: RUF001  a range takes an en dash


def fuzz_sections(records: Sequence[AnyRecord]) -> list[Section]:
    found = [record for record in records if isinstance(record, FuzzRecord)]
    return [_fuzz_section(found)] if found else []


def _fuzz_section(records: Sequence[FuzzRecord]) -> Section:
    runs = list(group(records, lambda r: (r.command, r.seed)).values())
    crashed = [[record] for record in records if record.crashes]
    rows = [*runs, *crashed]
    columns = {
        "sent to": [_fuzz_targets(run) for run in runs] + [text_cell(r.spec) for [r] in crashed],
        "seed": [count(row[0].seed) for row in rows],
        "messages": [count(sum(r.messages for r in row)) for row in rows],
        "decoded": [count(sum(r.decoded for r in row)) for row in rows],
        "refused": [count(sum(r.refused for r in row)) for row in rows],
        "crashes": [count(sum(r.crashes for r in row)) for row in rows],
        "processor": [seconds(sum(r.cpu_s for r in row)) for row in rows],
        "status": [_fuzz_status(row) for row in rows],
    }
    return Section(
        "Fuzzed messages",
        _fuzz_summary(records),
        grid_of(columns, [_without_crash(r) for r in rows]),
    )


def _fuzz_targets(records: Sequence[FuzzRecord]) -> Cell:
    settings = len(records)
    return Cell(f"{settings:,} setting{'s' if settings > 1 else ''}", settings)


def _without_crash(records: Sequence[FuzzRecord]) -> bool:
    return not any(record.crashes for record in records)


def _fuzz_status(records: Sequence[FuzzRecord]) -> Cell:
    return text_cell("ok" if _without_crash(records) else "crashed")


def _fuzz_summary(records: Sequence[FuzzRecord]) -> str:
    crashes, names = sum(r.crashes for r in records), {_method_name(r.spec) for r in records}
    target = f"{len(names)} methods" if len(names) > 1 else names.pop()
    messages = f"{sum(r.messages for r in records):,} malicious or corrupted messages to {target}"
    if crashes:
        return f"Of {messages}, {crashes:,} caused a crash."
    return f"Each of {messages} was decoded or refused."


def _method_name(spec: str) -> str:
    """Returns the method of a spec, or the first of a pipeline."""
    return spec.partition(":")[0].partition(" ")[0]


def fault_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section on jobs, and one on all faults by their kind."""
    jobs = [record for record in records if isinstance(record, CampaignRecord)]
    faults = [record for record in records if isinstance(record, FaultRecord)]
    return ([_jobs_section(jobs)] if jobs else []) + ([_kinds_section(faults)] if faults else [])


def _jobs_section(jobs: Sequence[CampaignRecord]) -> Section:
    undamaged = [_undamaged(job) for job in jobs]
    columns = {
        "job": [text_cell(job.job) for job in jobs],
        "method": [text_cell(job.spec) for job in jobs],
        "workers": [count(job.workers) for job in jobs],
        "links": [text_cell(human.rate(job.rate)) for job in jobs],
        "faults": [count(job.faults) for job in jobs],
        "hangs": [count(job.hung) for job in jobs],
        "lost checkpoints": [count(job.lost_checkpoints) for job in jobs],
        "unexpected ends": [count(job.unexpected) for job in jobs],
        "detected after at most": [seconds(_if_any(job.max_detected_s)) for job in jobs],
        "wrong losses": [count(job.wrong_losses) for job in jobs],
        "same weights": [_same_cell(job) for job in jobs],
        "status": [text_cell("ok" if fine else "damaged") for fine in undamaged],
    }
    return Section(
        "Jobs with injected faults",
        f"{sum(undamaged)} of {len(jobs)} jobs had no hang, no lost checkpoint, no unexpected end "
        "and the losses and weights of a job without faults.",
        grid_of(columns, undamaged),
    )


def _same_cell(job: CampaignRecord) -> Cell:
    return text_cell("not compared") if job.same_weights is None else yes_cell(job.same_weights)


def _undamaged(job: CampaignRecord) -> bool:
    correct = job.wrong_losses == job.lost_checkpoints == 0 and job.same_weights is not False
    return correct and job.hung == job.unexpected == 0


def _kinds_section(faults: Sequence[FaultRecord]) -> Section:
    kinds = group(faults, lambda fault: (fault.job, fault.fault, fault.phase))
    rows = list(kinds.values())
    fine = [all(fault.as_expected and not fault.hung for fault in row) for row in rows]
    columns = {
        "job": [text_cell(job) for job, _, _ in kinds],
        "fault": [text_cell(f"{kind} in {phase}" if phase else kind) for _, kind, phase in kinds],
        "faults": [count(len(row)) for row in rows],
        "as expected": [count(sum(fault.as_expected for fault in row)) for row in rows],
        "hangs": [count(sum(fault.hung for fault in row)) for row in rows],
        "detected after at most": [seconds(_slowest_s(row)) for row in rows],
        "threads left": [count(sum(fault.threads_left for fault in row)) for row in rows],
    }
    odd = sum(not fault.as_expected for fault in faults)
    outcome = "all ranks ended as they should each time"
    if odd:
        outcome = f"in {odd:,} {'case' if odd == 1 else 'cases'} a rank did not end as it should"
    return Section("Faults", f"{len(faults):,} faults: {outcome}.", grid_of(columns, fine))


def _slowest_s(faults: Sequence[FaultRecord]) -> float | None:
    return max((fault.detected_s for fault in faults if fault.detected_s >= 0), default=None)


def _if_any(detected_s: float) -> float | None:
    return detected_s if detected_s >= 0 else None


def elastic_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section on jobs whose replicas were killed and joined again."""
    jobs = [record for record in records if isinstance(record, ElasticRecord)]
    if not jobs:
        return []
    fine = [_is_elastic(job) for job in jobs]
    columns = {
        "method": [text_cell(job.spec) for job in jobs],
        "replicas": [count(job.replicas) for job in jobs],
        "kills": [count(job.kills) for job in jobs],
        "survived": [count(job.survived) for job in jobs],
        "next commit (median)": [seconds(_median(job.recovery_s)) for job in jobs],
        "next commit (most)": [seconds(max(job.recovery_s, default=None)) for job in jobs],
        "steps": [count(job.steps) for job in jobs],
        "steps with different bits": [count(job.wrong_steps) for job in jobs],
        "bytes a step": [text_cell(_bytes(job.sent_bytes)) for job in jobs],
        "first loss": [text_cell(_loss(job.first_loss)) for job in jobs],
        "last loss": [text_cell(_loss(job.last_loss)) for job in jobs],
        "status": [text_cell("ok" if good else "damaged") for good in fine],
    }
    return [
        Section(
            "Replicas that are killed and join again",
            f"{sum(fine)} of {len(jobs)} jobs survived every kill, with equal bits on all replicas "
            "after every step.",
            grid_of(columns, fine),
        )
    ]


def _is_elastic(job: ElasticRecord) -> bool:
    damaged = job.hung or job.wrong_steps or job.repeated_steps or job.unexpected
    return job.survived == job.kills and not damaged


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _bytes(sent: float | None) -> str:
    return "not counted" if sent is None else f"{sent:,.0f}"


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f}"
