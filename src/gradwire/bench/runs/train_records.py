"""Builds training records from the messages of workers, with the time to a target."""

import math
from dataclasses import dataclass, field

from gradwire.bench.records.compare import LOSS, Target, efficiency, median_of, time_to_target
from gradwire.bench.records.schema import COMPUTE, Point, Record, Status, TrainRecord
from gradwire.bench.runs.cluster_run import Collector, Provenance
from gradwire.bench.worker.protocol import Evaluated, Failed, Finished, Job, Message, Started, Tick
from gradwire.bench.workloads.base import Workload


@dataclass
class TrainCollector(Collector):
    """Makes one record per case; `evaluations` are those of the running case."""

    provenance: Provenance
    job: Job
    workload: Workload
    target: Target | None
    compute_ms: float | None = None
    """Time of a step without communication, once it is known."""
    running: str | None = None
    evaluations: list[Evaluated] = field(default_factory=list)

    def receive(self, message: Message) -> Record | None:
        match message:
            case Started(case=case):
                self.running, self.evaluations = case, []
            case Evaluated():
                self.evaluations.append(message)
            case Finished():
                self.running = None
                if message.case == COMPUTE:
                    self.compute_ms = median_of(message.steps_ms)
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
        return (
            "diverged"
            if self.evaluations and not math.isfinite(self.evaluations[-1].loss)
            else "done"
        )

    def _record(
        self, case: str, status: Status, error: str | None, end: Finished | None
    ) -> TrainRecord:
        points = tuple(map(_point, self.evaluations))
        last = self.evaluations[-1] if self.evaluations else None
        # Workers without communication do not train a common model, so they have no target.
        target = None if case == COMPUTE else self.target
        step_ms = median_of(end.steps_ms) if end else None
        return TrainRecord(
            spec=case,
            workload=self.workload.heading,
            workload_spec=self.job.workload,
            data=self.job.data,
            device=self.job.device,
            steps=self.job.steps,
            evaluate_every=self.job.evaluate_every,
            batch=self.workload.batch_size,
            workers=self.provenance.workers,
            rate=self.provenance.rate,
            shaped=self.provenance.shaped,
            seed=self.job.seed,
            status=status,
            error=error,
            command=self.provenance.command,
            machine=self.provenance.machine,
            points=points,
            losses=tuple(loss for evaluation in self.evaluations for loss in evaluation.losses),
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
            peak_device_bytes=end.peak_device_bytes if end else None,
            timeline=end.timeline if end else (),
        )


def _point(evaluation: Evaluated) -> Point:
    return Point(
        step=evaluation.step,
        time_s=evaluation.time_s,
        loss=evaluation.loss,
        sent_bytes=evaluation.sent_bytes,
        metric=evaluation.metric,
    )
