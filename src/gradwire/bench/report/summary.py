"""Summaries of the runs of one setting in plain sentences, also where compression did not pay."""

from collections.abc import Sequence

from gradwire.bench import human
from gradwire.bench.records.compare import Standing, Target, common_target, group, middle, standings
from gradwire.bench.records.schema import (
    BASELINE,
    COMPUTE,
    KernelRecord,
    RunRecord,
    StepRecord,
    TrainRecord,
)

# Closer than this, two times are the same time.
CLEAR = 1.05

NOT_SHAPED = "The links were not shaped, so these times describe this machine, not a network."


def train_summary(records: Sequence[TrainRecord]) -> str:
    """One sentence on who reached the target first, and one each on what limits it."""
    target = common_target(records)
    verdict = _step_verdict(records) if target is None else _race(records, target)
    return _with_limits(verdict, records)


def step_summary(records: Sequence[StepRecord]) -> str:
    return _with_limits(_step_verdict(records), records)


def _race(records: Sequence[TrainRecord], target: Target) -> str:
    goal, reached = target.words(), standings(records)
    if not reached:
        return f"No method reached {goal}."
    dense = next((entry for entry in reached if entry.spec == BASELINE), None)
    others = [entry for entry in reached if entry.spec != BASELINE]
    if dense is None:
        return f"{others[0].spec} {_reached(goal, others[0])}; {_why_no_dense(records)}."
    if not others:
        return f"Compression did not pay here: only dense training ({BASELINE}) reached {goal}."
    return _duel(goal, others[0], dense)


def _duel(goal: str, best: Standing, dense: Standing) -> str:
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


def _reached(goal: str, entry: Standing) -> str:
    return f"reached {goal} first, in {human.duration_s(entry.time_s)}"


def _why_no_dense(records: Sequence[TrainRecord]) -> str:
    if any(record.spec == BASELINE for record in records):
        return f"dense ({BASELINE}) did not reach it"
    return f"there is no dense run ({BASELINE}) to compare with"


def _step_verdict(records: Sequence[RunRecord]) -> str:
    """Who has the shortest step, for runs without a common target."""
    step_ms = {
        spec: time_ms
        for spec, runs in group(records, lambda record: record.spec).items()
        if (time_ms := middle(run.step_ms for run in runs)) is not None
    }
    # No step can be shorter than one without communication, which is no way to train.
    step_ms.pop(COMPUTE, None)
    dense_ms = step_ms.pop(BASELINE, None)
    if not step_ms:
        return "No method but dense was measured." if dense_ms else "No step time was measured."
    best = min(step_ms, key=lambda spec: step_ms[spec])
    own = human.duration_ms(step_ms[best])
    if dense_ms is None:
        return f"{best} has the shortest step, {own}; there is no dense run ({BASELINE})."
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


def _with_limits(verdict: str, records: Sequence[RunRecord]) -> str:
    sentences = [verdict]
    if not all(record.shaped for record in records):
        sentences.append(NOT_SHAPED)
    if stopped := [f"{r.spec} {r.status}" for r in records if r.status != "done"]:
        sentences.append(f"Not finished: {', '.join(dict.fromkeys(stopped))}.")
    if (most := _most_on_top(records)) is not None:
        sentences.append(f"The interfaces counted at most {most:.1%} more bytes than stated.")
    if len({(r.machine.get("cpu"), r.machine.get("cores")) for r in records}) > 1:
        sentences.append("The runs come from different machines: compare their times with care.")
    return " ".join(sentences)


def _most_on_top(records: Sequence[RunRecord]) -> float | None:
    """How much more the operating system saw leave a worker than its method says."""
    pairs = [(r.interface_bytes, r.sent_bytes) for r in records]
    return max((seen / said - 1 for seen, said in pairs if seen and said), default=None)


def kernel_summary(records: Sequence[KernelRecord]) -> str:
    """Which method is nearest to the speed of memory."""
    done = [record for record in records if record.status == "done"]
    if not done:
        return "No method could be measured."
    best = min(done, key=lambda record: record.ratio_to_floor)
    failed = dict.fromkeys(record.spec for record in records if record.status != "done")
    return (
        f"{best.spec} is nearest to the speed of memory: a step with error feedback takes "
        f"{best.ratio_to_floor:.1f} times its floor of {human.duration_ms(best.floor_us / 1e3)}."
        + (f" Not measured: {', '.join(failed)}." if failed else "")
    )
