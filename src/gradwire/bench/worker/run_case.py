"""Runs one case on one worker: a full training run, or a timed block of steps."""

import time
from collections.abc import Callable
from statistics import fmean

import torch.distributed as dist

from gradwire.bench.case import Traffic
from gradwire.bench.worker.protocol import Finished, Job, Look, Message, Tick
from gradwire.bench.worker.session import Session, cost

_TICK_S = 0.2

Tell = Callable[[Message], None]
Count = Callable[[], int | None]
"""What this host's interface has sent so far, where it is this worker's alone."""


def train(job: Job, case: str, tell: Tell, count: Count) -> None:
    """Trains a new model and looks at it from time to time.

    The warm-up has a model of its own: what it compiles and connects is no part of the run. The
    clock counts steps only. Everybody waits while rank 0 evaluates; without that, the others would
    compute their next step meanwhile and make it look short.
    """
    assert job.evaluate_every is not None
    _warm_up(job, case)
    session = Session(job, case)
    steps_ms: list[float] = []
    tick = _ticker(case, tell)
    _look(session, case, 0.0, tell)
    # Nobody counts while others still start.
    dist.barrier()
    before, counted = session.traffic(), count()
    for step in range(1, job.steps + 1):
        steps_ms.append(session.step() * 1e3)
        tick(step, steps_ms[-1])
        if step % job.evaluate_every == 0 or step == job.steps:
            _all_has_left(session)
            looking = count()
            _look(session, case, sum(steps_ms) / 1e3, tell)
            counted = _later(counted, looking, count())
    tell(_finished(session, case, before, steps_ms, job.steps, count=(counted, count())))
    session.close()


def block(job: Job, session: Session, case: str, tell: Tell, count: Count) -> None:
    """Takes some steps more; the first few, which find cold caches, are not counted.

    Where steps are not alike, as many periods of them warm up, since workers who talk now and then
    have only talked as often after these; and there are as many steps as make whole periods. Where
    means come late, a period that is counted but not timed sends one on its way, since the timed
    steps end with one under way, too.
    """
    period = session.mounted.period
    for _ in range(job.warmup * period + (session.mounted.rest - session.steps) % period):
        session.step()
    steps = _to_whole(job.steps, period)
    before = session.traffic()
    dist.barrier()
    counted = count()
    lead = period if session.mounted.rest else 0
    for _ in range(lead):
        session.step()
    tick = _ticker(case, tell)
    steps_ms: list[float] = []
    for step in range(1, steps + 1):
        steps_ms.append(session.step() * 1e3)
        tick(step, steps_ms[-1])
    _all_has_left(session)
    tell(_finished(session, case, before, steps_ms, lead + steps, count=(counted, count())))
    session.take_losses()


def _warm_up(job: Job, case: str) -> None:
    session = Session(job, case)
    for _ in range(_to_whole(job.warmup, session.mounted.period)):
        session.step()
    session.close()


def _all_has_left(session: Session) -> None:
    """Waits for what is under way, and for what others still wait for."""
    session.traffic()
    dist.barrier()


def _look(session: Session, case: str, time_s: float, tell: Tell) -> None:
    if not session.learns:
        return
    losses = session.take_losses()
    with session.mounted.averaged():
        evaluation = session.evaluate() if session.rank == 0 else None
    if evaluation is not None:
        loss, metric_name, metric = evaluation
        tell(
            Look(
                case=case,
                step=session.steps,
                time_s=time_s,
                sent_bytes=session.traffic().sent_bytes,
                loss=loss,
                metric_name=metric_name,
                metric=metric,
                losses=losses,
            )
        )
    dist.barrier()


def _ticker(case: str, tell: Tell) -> Callable[[int, float], None]:
    """Tells of steps a few times a second, so that fast ones are not slowed down by talk."""
    next_s = 0.0

    def tick(step: int, step_ms: float) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _TICK_S
            tell(Tick(case=case, step=step, step_ms=step_ms))

    return tick


def _since(before: int | None, after: int | None, steps: int) -> float | None:
    return None if before is None or after is None else (after - before) / steps


def _later(counted: int | None, before: int | None, after: int | None) -> int | None:
    """The count to start from when what was sent from `before` to `after` is not to count."""
    if counted is None or before is None or after is None:
        return counted
    return counted + after - before


def _to_whole(steps: int, period: int) -> int:
    """So many steps, or a few more that make whole periods."""
    return -(-steps // period) * period


def _evened(steps_ms: list[float], period: int) -> tuple[float, ...]:
    """Every step as long as the mean step of its period; a last one that is not whole is left out.

    A median of single steps would not see the one in which workers talk.
    """
    whole = len(steps_ms) // period * period or len(steps_ms)
    periods = (steps_ms[i : i + period] for i in range(0, whole, period))
    return tuple(fmean(own) for own in periods for _ in own)


def _finished(
    session: Session,
    case: str,
    before: Traffic,
    steps_ms: list[float],
    steps: int,
    count: tuple[int | None, int | None],
) -> Finished:
    """What `steps` of them cost, of which these took so long."""
    after = session.traffic()
    spent = cost(before, after, steps)
    return Finished(
        case=case,
        parameters=session.parameters,
        steps_ms=_evened(steps_ms, session.mounted.period),
        sent_bytes=spent.sent_bytes,
        dense_bytes=session.dense_bytes,
        encode_ms=spent.encode_ms,
        wire_ms=spent.wire_ms,
        decode_ms=spent.decode_ms,
        interface_bytes=_since(*count, steps),
        backend=after.backend,
        timeline=after.timeline,
    )
