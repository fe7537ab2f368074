"""Summaries of the runs of one setting in plain sentences, also where compression did not pay."""

from collections.abc import Iterator, Sequence

from gradwire.bench import human
from gradwire.bench.records.compare import (
    Target,
    TargetTime,
    common_target,
    group,
    median_of,
    target_times,
)
from gradwire.bench.records.schema import (
    BASELINE,
    COMPUTE,
    KernelRecord,
    RunRecord,
    StepRecord,
    TrainRecord,
)
from gradwire.bench.report.grid import took_fewer_steps

# Times whose ratio is below this count as equal.
CLEAR = 1.05

NOT_SHAPED = "The links were not shaped, so these times describe this machine, not a network."


def train_summary(records: Sequence[TrainRecord]) -> str:
    """Summarises the fastest method in one sentence, and each limitation in another."""
    target = common_target(records)
    verdict = _step_verdict(records) if target is None else _target_verdict(records, target)
    return _with_limits(verdict, records)


def step_summary(records: Sequence[StepRecord]) -> str:
    """Summarises the shortest step, and which methods took fewer steps than asked."""
    summary = _with_limits(_step_verdict(records), records)
    done = [r for r in records if r.status == "done" and took_fewer_steps(r)]
    if not done:
        return summary
    counts = ", ".join(f"{r.spec} {r.steps} of {r.steps_asked}" for r in done)
    return f"{summary} Slow cases took fewer steps than asked: {counts}."


def _target_verdict(records: Sequence[TrainRecord], target: Target) -> str:
    goal, reached = target.words(), target_times(records)
    if not reached:
        return f"No method reached {goal}."
    dense = next((entry for entry in reached if entry.spec == BASELINE), None)
    others = [entry for entry in reached if entry.spec != BASELINE]
    if dense is None:
        return f"{others[0].spec} {_reached(goal, others[0])}; {_why_no_dense(records)}."
    if not others:
        return f"Compression did not pay here: only dense training ({BASELINE}) reached {goal}."
    return _compare_with_dense(goal, others[0], dense)


def _compare_with_dense(goal: str, best: TargetTime, dense: TargetTime) -> str:
    gain, time = dense.time_s / best.time_s, human.duration_s(dense.time_s)
    if gain >= CLEAR:
        factor = human.times(gain)
        return (
            f"{best.spec} {_reached(goal, best)}: {factor} as fast as dense ({BASELINE}, {time})."
        )
    if gain > 1 / CLEAR:
        own = human.duration_s(best.time_s)
        return (
            f"Compression made no difference here: {best.spec} reached {goal} in {own}, "
            f"dense ({BASELINE}) in {time}."
        )
    return (
        f"Compression did not pay here: dense ({BASELINE}) {_reached(goal, dense)}; "
        f"the best other method, {best.spec}, took {human.duration_s(best.time_s)}."
    )


def _reached(goal: str, entry: TargetTime) -> str:
    return f"reached {goal} first, in {human.duration_s(entry.time_s)}"


def _why_no_dense(records: Sequence[TrainRecord]) -> str:
    if any(record.spec == BASELINE for record in records):
        return f"dense ({BASELINE}) did not reach it"
    return f"there is no dense run ({BASELINE}) to compare with"


def _step_verdict(records: Sequence[RunRecord]) -> str:
    """Names the method with the shortest step, for runs without a common target."""
    finished = [record for record in records if record.status != "interrupted"]
    step_ms = {
        spec: time_ms
        for spec, runs in group(finished, lambda record: record.spec).items()
        if (time_ms := median_of(run.step_ms for run in runs)) is not None
    }
    # A step without communication is always shortest, but does not train one model.
    step_ms.pop(COMPUTE, None)
    dense_ms = step_ms.pop(BASELINE, None)
    if not step_ms and len(finished) < len(records):
        return "No compressed run was finished, so no method is named the fastest."
    if not step_ms:
        return "Only dense training was measured." if dense_ms else "No step time was measured."
    best = min(step_ms, key=lambda spec: step_ms[spec])
    own = human.duration_ms(step_ms[best])
    if dense_ms is None:
        return f"{best} has the shortest step, {own}; {_no_dense_step(records)}."
    gain, dense = dense_ms / step_ms[best], human.duration_ms(dense_ms)
    if gain >= CLEAR:
        return (
            f"{best} has the shortest step, {own}: "
            f"{human.times(gain)} as fast as dense ({BASELINE}, {dense})."
        )
    return (
        f"Compression did not make steps shorter here: "
        f"dense ({BASELINE}) takes {dense}, the best other method, {best}, {own}."
    )


def _no_dense_step(records: Sequence[RunRecord]) -> str:
    if any(r.spec == BASELINE and r.status == "interrupted" for r in records):
        return f"the dense run ({BASELINE}) was interrupted"
    return f"there is no dense run ({BASELINE})"


def _with_limits(verdict: str, records: Sequence[RunRecord]) -> str:
    sentences = [verdict]
    if not all(record.shaped for record in records):
        sentences.append(NOT_SHAPED)
    sentences += _unfinished(records)
    if (most := _most_overhead(records)) is not None:
        share = f"at most {most:.1%} more" if most >= 0 else f"at least {-most:.1%} fewer"
        sentences.append(f"The interfaces counted {share} bytes than the methods.")
    if len({(r.machine.get("cpu"), r.machine.get("cores")) for r in records}) > 1:
        sentences.append("The runs come from different machines: compare their times with care.")
    return " ".join(sentences)


MOST_NAMES = 6
"""Methods that failed and are named; the rest is counted, as are all that were interrupted."""


def _unfinished(records: Sequence[RunRecord]) -> Iterator[str]:
    broken = [f"{r.spec} {r.status}" for r in records if r.status in ("failed", "diverged")]
    names = list(dict.fromkeys(broken))
    if names:
        more = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
        yield f"Not finished: {', '.join(names[:MOST_NAMES])}{more}."
    if interrupted := sum(record.status == "interrupted" for record in records):
        yield f"{interrupted} of {len(records)} runs were interrupted."


def gain_over_dense(records: Sequence[RunRecord]) -> float | None:
    """Returns the time of dense training over that of the fastest other method.

    Times are those to the common target, or of a step if there is none; runs that were interrupted
    do not count.
    """
    done = [record for record in records if record.status == "done"]
    trained = [record for record in done if isinstance(record, TrainRecord)]
    if trained and common_target(trained) is not None:
        times = {entry.spec: entry.time_s for entry in target_times(trained)}
    else:
        medians = {
            spec: median_of(run.step_ms for run in runs)
            for spec, runs in group(done, lambda record: record.spec).items()
        }
        times = {spec: time for spec, time in medians.items() if time}
    dense = times.pop(BASELINE, None)
    times.pop(COMPUTE, None)
    return dense / min(times.values()) if dense and times else None


def _most_overhead(records: Sequence[RunRecord]) -> float | None:
    """Returns the largest share by which interface counters exceed the bytes of the method."""
    pairs = [(r.interface_bytes, r.sent_bytes) for r in records]
    return max((counted / sent - 1 for counted, sent in pairs if counted and sent), default=None)


def kernel_summary(records: Sequence[KernelRecord]) -> str:
    """Names the method whose step is nearest to the memory-traffic floor."""
    done = [record for record in records if record.status == "done"]
    if not done:
        return "No method could be measured."
    best = min(done, key=lambda record: record.ratio_to_floor)
    failed = dict.fromkeys(r.spec for r in records if r.status not in ("done", "interrupted"))
    limited = dict.fromkeys(r.spec for r in records if r.status == "interrupted")
    return (
        f"{best.spec} is nearest to the memory-traffic floor: a step with error feedback takes "
        f"{best.ratio_to_floor:.1f} times its floor of {human.duration_ms(best.floor_us / 1e3)}."
        + (f" Not measured: {', '.join(failed)}." if failed else "")
        + (f" Over the time limit: {_few(list(limited))}." if limited else "")
    )


def _few(specs: Sequence[str]) -> str:
    return ", ".join(specs) if len(specs) <= MOST_NAMES else f"{len(specs)} methods"
