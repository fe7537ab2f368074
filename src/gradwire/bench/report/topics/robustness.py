"""Sections on robustness: the cost of guards, fuzzed messages, and jobs with killed workers."""

from collections.abc import Sequence

from gradwire.bench import human
from gradwire.bench.records.compare import Links, group
from gradwire.bench.records.schema import (
    AnyRecord,
    ChaosRecord,
    FuzzRecord,
    GuardRecord,
    KillRecord,
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


def _quartiles(record: GuardRecord) -> Cell:
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


def chaos_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section on jobs, and one on all kills by the phase in which they occurred."""
    jobs = [record for record in records if isinstance(record, ChaosRecord)]
    kills = [record for record in records if isinstance(record, KillRecord)]
    return ([_jobs_section(jobs)] if jobs else []) + ([_kills_section(kills)] if kills else [])


def _jobs_section(jobs: Sequence[ChaosRecord]) -> Section:
    undamaged = [_undamaged(job) for job in jobs]
    columns = {
        "method": [text_cell(job.spec) for job in jobs],
        "workers": [count(job.workers) for job in jobs],
        "links": [text_cell(human.rate(job.rate)) for job in jobs],
        "kills": [count(job.kills) for job in jobs],
        "detected": [count(job.detected) for job in jobs],
        "after at most": [seconds(job.max_detected_s) for job in jobs],
        "ended": [count(job.ended) for job in jobs],
        "wrong losses": [count(job.wrong_losses) for job in jobs],
        "corrupted checkpoints": [count(job.corrupted_checkpoints) for job in jobs],
        "same weights": [yes_cell(job.same_weights) for job in jobs],
        "status": [text_cell("ok" if fine else "damaged") for fine in undamaged],
    }
    return Section(
        "Jobs with killed workers",
        f"{sum(undamaged)} of {len(jobs)} reached the weights of a job without kills, with every "
        "kill detected and no wrong loss or checkpoint.",
        grid_of(columns, undamaged),
    )


def _undamaged(job: ChaosRecord) -> bool:
    correct = job.wrong_losses == job.corrupted_checkpoints == 0 and job.same_weights
    return correct and job.detected == job.ended == job.kills


def _kills_section(kills: Sequence[KillRecord]) -> Section:
    phases = group(kills, lambda kill: kill.phase)
    rows = phases.values()
    ended = [all(kill.ended for kill in row) for row in rows]
    columns = {
        "killed in": [text_cell(phase) for phase in phases],
        "kills": [count(len(row)) for row in rows],
        "detected": [count(sum(kill.detected_s >= 0 for kill in row)) for row in rows],
        "after at most": [seconds(_slowest_s(row)) for row in rows],
        "threads left": [count(sum(kill.threads_left for kill in row)) for row in rows],
        "others ended": [count(sum(kill.ended for kill in row)) for row in rows],
    }
    unended = sum(not kill.ended for kill in kills)
    outcome = "the others ended with an error each time"
    if unended:
        cases = "case" if unended == 1 else "cases"
        outcome = f"in {unended:,} {cases} the others did not all end with an error"
    return Section("Kills", f"{len(kills):,} kills: {outcome}.", grid_of(columns, ended))


def _slowest_s(kills: Sequence[KillRecord]) -> float | None:
    return max((kill.detected_s for kill in kills if kill.detected_s >= 0), default=None)
