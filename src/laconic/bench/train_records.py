"""Training records from what the workers say, with the time to a target loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.bench.messages import Failed, Finished, Look, Message, Started, Tick
from laconic.bench.race import Collector, Place
from laconic.bench.records import Point, Record, Status, TrainRecord
from laconic.bench.speed import middle


@dataclass
class TrainCollector(Collector):
    """One record a case; `looks` are those of the case that is running."""

    place: Place
    title: str
    seed: int
    target_loss: float | None
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
        return "done" if math.isfinite(self.looks[-1].loss) else "diverged"

    def _record(
        self, case: str, status: Status, error: str | None, end: Finished | None
    ) -> TrainRecord:
        points = tuple(
            Point(step=look.step, time_s=look.time_s, loss=look.loss, sent_bytes=look.sent_bytes)
            for look in self.looks
        )
        last = self.looks[-1] if self.looks else None
        return TrainRecord(
            spec=case,
            workload=self.title,
            workers=self.place.workers,
            rate=self.place.rate,
            shaped=self.place.shaped,
            seed=self.seed,
            status=status,
            error=error,
            command=self.place.command,
            machine=self.place.machine,
            points=points,
            step_ms=middle(end.steps_ms) if end else None,
            sent_bytes=end.sent_bytes if end else None,
            dense_bytes=end.dense_bytes if end else None,
            ratio=end.dense_bytes / end.sent_bytes if end and end.sent_bytes else None,
            final_loss=last.loss if last else None,
            metric=last.metric if last else None,
            metric_name=last.metric_name if last else None,
            target_loss=self.target_loss,
            time_to_target_s=time_to_target(points, self.target_loss),
            encode_ms=end.encode_ms if end else None,
            wire_ms=end.wire_ms if end else None,
            decode_ms=end.decode_ms if end else None,
        )


def time_to_target(points: Sequence[Point], target: float | None) -> float | None:
    """When the loss first came down to `target`, on a straight line between two looks."""
    if target is None:
        return None
    before: Point | None = None
    for point in points:
        if point.loss <= target:
            return point.time_s if before is None else _crossing(before, point, target)
        before = point if math.isfinite(point.loss) else None
    return None


def _crossing(above: Point, below: Point, target: float) -> float:
    share = (above.loss - target) / (above.loss - below.loss)
    return above.time_s + share * (below.time_s - above.time_s)
