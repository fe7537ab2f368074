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
from gradwire.bench.report.section import Section, count, grid_of, ms, ratio, seconds, word, yes


def guard_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each workload and cluster."""
    found = (record for record in records if isinstance(record, GuardRecord))
    alike = group(found, lambda r: (r.workload, Links(r.workers, r.rate, r.shaped)))
    return [_guard_section(f"{name}, {on.words()}", rows) for (name, on), rows in alike.items()]


def _guard_section(setting: str, records: Sequence[GuardRecord]) -> Section:
    within = [record.ratio <= record.limit for record in records]
    columns = {
        "method": [word(r.spec) for r in records],
        "guard": [word(r.guard) for r in records],
        "rounds": [count(r.rounds) for r in records],
        "without": [ms(r.without_ms) for r in records],
        "with": [ms(r.with_ms) for r in records],
        "ratio": [ratio(r.ratio, 3) for r in records],
        "quartiles": [_quartiles(r) for r in records],
        "limit": [ratio(r.limit) for r in records],
        "status": [word("within" if fine else "over") for fine in within],
    }
    return Section(
        f"What guards cost: {setting}",
        f"{sum(within)} of {len(records)} measurements are within their limit, which is for the "
        "median over rounds of a step with the guard to one without.",
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
        "sent to": [_fuzz_targets(run) for run in runs] + [word(r.spec) for [r] in crashed],
        "seed": [count(row[0].seed) for row in rows],
        "messages": [count(sum(r.messages for r in row)) for row in rows],
        "decoded": [count(sum(r.decoded for r in row)) for row in rows],
        "refused": [count(sum(r.refused for r in row)) for row in rows],
        "crashes": [count(sum(r.crashes for r in row)) for row in rows],
        "processor": [seconds(sum(r.cpu_s for r in row)) for row in rows],
        "status": [_fuzz_status(row) for row in rows],
    }
    return Section(
        "Hostile bytes", _fuzz_summary(records), grid_of(columns, [_without_crash(r) for r in rows])
    )


def _fuzz_targets(records: Sequence[FuzzRecord]) -> Cell:
    settings = len(records)
    return Cell(f"{settings:,} setting{'s' if settings > 1 else ''}", settings)


def _without_crash(records: Sequence[FuzzRecord]) -> bool:
    return not any(record.crashes for record in records)


def _fuzz_status(records: Sequence[FuzzRecord]) -> Cell:
    return word("sound" if _without_crash(records) else "crashed")


def _fuzz_summary(records: Sequence[FuzzRecord]) -> str:
    crashes, names = sum(r.crashes for r in records), {_method_name(r.spec) for r in records}
    whom = f"{len(names)} methods" if len(names) > 1 else names.pop()
    messages = f"{sum(r.messages for r in records):,} hostile or broken messages to {whom}"
    if crashes:
        return f"Of {messages}, {crashes:,} made something crash."
    return f"Each of {messages} was read or refused."


def _method_name(spec: str) -> str:
    """The method of a setting, or the first of a pipeline."""
    return spec.partition(":")[0].partition(" ")[0]


def chaos_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One about jobs, and one about all kills by the moment in which they came."""
    jobs = [record for record in records if isinstance(record, ChaosRecord)]
    kills = [record for record in records if isinstance(record, KillRecord)]
    return ([_jobs_section(jobs)] if jobs else []) + ([_kills_section(kills)] if kills else [])


def _jobs_section(jobs: Sequence[ChaosRecord]) -> Section:
    sound = [_undamaged(job) for job in jobs]
    columns = {
        "method": [word(job.spec) for job in jobs],
        "workers": [count(job.workers) for job in jobs],
        "links": [word(human.rate(job.rate)) for job in jobs],
        "kills": [count(job.kills) for job in jobs],
        "noticed": [count(job.detected) for job in jobs],
        "after at most": [seconds(job.max_detected_s) for job in jobs],
        "ended": [count(job.ended) for job in jobs],
        "wrong losses": [count(job.wrong_losses) for job in jobs],
        "corrupted checkpoints": [count(job.corrupted_checkpoints) for job in jobs],
        "same weights": [yes(job.same_weights) for job in jobs],
        "status": [word("sound" if fine else "damaged") for fine in sound],
    }
    return Section(
        "Jobs whose workers were killed",
        f"{sum(sound)} of {len(jobs)} came to the weights of a job that was left alone, with "
        "every kill noticed and nothing wrong on the way.",
        grid_of(columns, sound),
    )


def _undamaged(job: ChaosRecord) -> bool:
    whole = job.wrong_losses == job.corrupted_checkpoints == 0 and job.same_weights
    return whole and job.detected == job.ended == job.kills


def _kills_section(kills: Sequence[KillRecord]) -> Section:
    moments = group(kills, lambda kill: kill.phase)
    rows = moments.values()
    ended = [all(kill.ended for kill in row) for row in rows]
    columns = {
        "killed in": [word(phase) for phase in moments],
        "kills": [count(len(row)) for row in rows],
        "noticed": [count(sum(kill.detected_s >= 0 for kill in row)) for row in rows],
        "after at most": [seconds(_slowest_s(row)) for row in rows],
        "threads left": [count(sum(kill.threads_left for kill in row)) for row in rows],
        "others ended": [count(sum(kill.ended for kill in row)) for row in rows],
    }
    unended = sum(not kill.ended for kill in kills)
    said = "the others ended with an error each time"
    if unended:
        cases = "case" if unended == 1 else "cases"
        said = f"in {unended:,} {cases} the others did not all end with an error"
    return Section("Kills", f"{len(kills):,} kills: {said}.", grid_of(columns, ended))


def _slowest_s(kills: Sequence[KillRecord]) -> float | None:
    return max((kill.detected_s for kill in kills if kill.detected_s >= 0), default=None)
