"""Builds training records from the messages of workers, with the time to a target."""

import math
from dataclasses import dataclass, field

from gradwire.bench.records.compare import LOSS, Target, efficiency, middle, time_to_target
from gradwire.bench.records.schema import COMPUTE, Point, Record, Status, TrainRecord
from gradwire.bench.runs.cluster_run import Collector, Place
from gradwire.bench.worker.protocol import Failed, Finished, Job, Look, Message, Started, Tick
from gradwire.bench.workloads.base import Workload


@dataclass
class TrainCollector(Collector):
    """One record a case; `looks` are those of the case that is running."""

    place: Place
    job: Job
    workload: Workload
    target: Target | None
    compute_ms: float | None = None
    """The step without communication, once it is known."""
    running: str | None = None
    looks: list[Look] = field(default_factory=list)

    def hear(self, message: Message) -> Record | None:
        match message:
            case Started(case=case):
                self.running, self.looks = case, []
            case Look():
                self.looks.append(message)
            case Finished():
                self.running = None
                if message.case == COMPUTE:
                    self.compute_ms = middle(message.steps_ms)
                return self._record(message.case, self._status(), None, message)
            case Failed(case=case, error=error):
                self.running = None
                return self._record(case, "failed", error, None)
            case Tick():
                pass
        return None

    def unfinished(self) -> list[Record]:
        if self.running is None:
            return []
        return [self._record(self.running, "interrupted", None, None)]

    def _status(self) -> Status:
        return "diverged" if self.looks and not math.isfinite(self.looks[-1].loss) else "done"

    def _record(
        self, case: str, status: Status, error: str | None, end: Finished | None
    ) -> TrainRecord:
        points = tuple(map(_point, self.looks))
        last = self.looks[-1] if self.looks else None
        # Workers that do not talk train no model of all, so there is nothing for them to reach.
        target = None if case == COMPUTE else self.target
        step_ms = middle(end.steps_ms) if end else None
        return TrainRecord(
            spec=case,
            workload=self.workload.heading,
            workload_spec=self.job.workload,
            data=self.job.data,
            device=self.job.device,
            steps=self.job.steps,
            evaluate_every=self.job.evaluate_every,
            batch=self.workload.batch_size,
            workers=self.place.workers,
            rate=self.place.rate,
            shaped=self.place.shaped,
            seed=self.job.seed,
            status=status,
            error=error,
            command=self.place.command,
            machine=self.place.machine,
            points=points,
            losses=tuple(loss for look in self.looks for loss in look.losses),
            final_loss=last.loss if last else None,
            metric=last.metric if last else None,
            metric_name=last.metric_name if last else None,
            metric_better=self.workload.metric.better,
            target_loss=target.value if target and target.name == LOSS else None,
            target_metric=target.value if target and target.name != LOSS else None,
            time_to_target_s=time_to_target(points, target),
            step_ms=step_ms,
            compute_ms=self.compute_ms,
            scaling_efficiency=efficiency(self.compute_ms, step_ms),
            parameters=end.parameters if end else None,
            sent_bytes=end.sent_bytes if end else None,
            interface_bytes=end.interface_bytes if end else None,
            dense_bytes=end.dense_bytes if end else None,
            ratio=end.dense_bytes / end.sent_bytes if end and end.sent_bytes else None,
            encode_ms=end.encode_ms if end else None,
            wire_ms=end.wire_ms if end else None,
            decode_ms=end.decode_ms if end else None,
            backend=end.backend if end else None,
            timeline=end.timeline if end else (),
        )


def _point(look: Look) -> Point:
    return Point(
        step=look.step,
        time_s=look.time_s,
        loss=look.loss,
        sent_bytes=look.sent_bytes,
        metric=look.metric,
    )
