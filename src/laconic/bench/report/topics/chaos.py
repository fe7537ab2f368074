"""Jobs whose workers were killed: what came of them, and how each kind of kill was noticed."""

from collections.abc import Sequence

from laconic.bench import human
from laconic.bench.records.chaos import ChaosRecord, KillRecord
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import group
from laconic.bench.report.cells import count, grid_of, seconds, word, yes
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One about jobs, and one about all kills by the moment in which they came."""
    jobs = [record for record in records if isinstance(record, ChaosRecord)]
    kills = [record for record in records if isinstance(record, KillRecord)]
    return ([_of_jobs(jobs)] if jobs else []) + ([_of_kills(kills)] if kills else [])


def _of_jobs(jobs: Sequence[ChaosRecord]) -> Section:
    sound = [_sound(job) for job in jobs]
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


def _sound(job: ChaosRecord) -> bool:
    whole = job.wrong_losses == job.corrupted_checkpoints == 0 and job.same_weights
    return whole and job.detected == job.ended == job.kills


def _of_kills(kills: Sequence[KillRecord]) -> Section:
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
