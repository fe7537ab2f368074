"""Runs one case on one worker: a full training run, or a timed block of steps."""

import time
from collections.abc import Callable
from statistics import fmean

import torch.distributed as dist

from gradwire.bench.case import Traffic
from gradwire.bench.worker.protocol import Evaluated, Finished, Job, Message, Tick
from gradwire.bench.worker.session import Session, cost
from gradwire.bench.worker.time_budget import TimeBudget, whole_periods

_TICK_S = 0.2

Send = Callable[[Message], None]
ByteCounter = Callable[[], int | None]
"""Returns the bytes that this host's interface has sent, or None if workers share it."""


def train(job: Job, case: str, send: Send, count: ByteCounter) -> None:
    """Trains a new model and evaluates it every `evaluate_every` steps.

    The warm-up has a model of its own: compilation and connections are not part of the run. The
    clock counts steps only. All ranks wait while rank 0 evaluates; otherwise the others would
    compute their next step meanwhile and make it look short.
    """
    assert job.evaluate_every is not None
    _warm_up(job, case)
    session = Session(job, case)
    steps_ms: list[float] = []
    tick = _ticker(case, send)
    _evaluate(session, case, 0.0, send)
    # Counting begins when all ranks have started.
    dist.barrier()
    before, counted = session.traffic(), count()
    for step in range(1, job.steps + 1):
        steps_ms.append(session.step() * 1e3)
        tick(step, steps_ms[-1])
        if step % job.evaluate_every == 0 or step == job.steps:
            _drain(session)
            before_evaluation = count()
            _evaluate(session, case, sum(steps_ms) / 1e3, send)
            counted = _skip_bytes(counted, before_evaluation, count())
    send(_finished(session, case, before, steps_ms, job.steps, count=(counted, count())))
    session.close()


def time_block(
    budget: TimeBudget, session: Session, case: str, send: Send, count: ByteCounter
) -> None:
    """Times further steps of a session; the first few, with cold caches, are not counted.

    If a method synchronises once per period of steps, the warm-up has `warmup` periods, so that it
    has `warmup` synchronisations, and whole periods are timed. If means are applied late, a period
    that is counted but not timed starts a synchronisation, since the timed steps also end with one
    in flight.
    """
    period = session.mounted.period
    untimed = (session.mounted.idle_offset - session.steps) % period
    untimed += budget.warm_ups(case, period) * period
    warm_up_s = [session.step() for _ in range(untimed)]
    steps = budget.steps(case, period, warm_up_s)
    before = session.traffic()
    dist.barrier()
    counted = count()
    lead = period if session.mounted.idle_offset else 0
    for _ in range(lead):
        session.step()
    tick = _ticker(case, send)
    steps_ms: list[float] = []
    for step in range(1, steps + 1):
        steps_ms.append(session.step() * 1e3)
        tick(step, steps_ms[-1])
    _drain(session)
    send(_finished(session, case, before, steps_ms, lead + steps, count=(counted, count())))
    budget.end_block(case, steps_ms)
    session.take_losses()


def _warm_up(job: Job, case: str) -> None:
    session = Session(job, case)
    for _ in range(whole_periods(job.warmup, session.mounted.period)):
        session.step()
    session.close()


def _drain(session: Session) -> None:
    """Waits for all messages in flight, on all ranks."""
    session.traffic()
    dist.barrier()


def _evaluate(session: Session, case: str, time_s: float, send: Send) -> None:
    if not session.learns:
        return
    losses = session.take_losses()
    with session.mounted.averaged():
        evaluation = session.evaluate() if session.rank == 0 else None
    if evaluation is not None:
        loss, metric_name, metric = evaluation
        send(
            Evaluated(
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


def _ticker(case: str, send: Send) -> Callable[[int, float], None]:
    """Reports steps a few times a second, so that messages do not slow down fast steps."""
    next_s = 0.0

    def tick(step: int, step_ms: float) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _TICK_S
            send(Tick(case=case, step=step, step_ms=step_ms))

    return tick


def _mean_bytes(before: int | None, after: int | None, steps: int) -> float | None:
    return None if before is None or after is None else (after - before) / steps


def _skip_bytes(counted: int | None, before: int | None, after: int | None) -> int | None:
    """Moves the start of the count, so that bytes sent from `before` to `after` do not count."""
    if counted is None or before is None or after is None:
        return counted
    return counted + after - before


def _period_means(steps_ms: list[float], period: int) -> tuple[float, ...]:
    """Replaces every step time by the mean of its period; drops a last period that is not whole.

    A median of single steps would miss the step that synchronises.
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
    """Summarises the traffic of `steps` steps and the times of those that were timed."""
    after = session.traffic()
    spent = cost(before, after, steps)
    return Finished(
        case=case,
        parameters=session.parameters,
        steps_ms=_period_means(steps_ms, session.mounted.period),
        sent_bytes=spent.sent_bytes,
        dense_bytes=session.dense_bytes,
        encode_ms=spent.encode_ms,
        wire_ms=spent.wire_ms,
        decode_ms=spent.decode_ms,
        interface_bytes=_mean_bytes(*count, steps),
        backend=after.backend,
        timeline=after.timeline,
        received_bytes=spent.received_bytes,
        exposed_share=session.exposed_share(),
        peak_device_bytes=session.memory.peak_bytes,
    )
