"""Step records from blocks of steps: medians over all blocks of a case."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from laconic.bench.hosts.messages import Failed, Finished, Message
from laconic.bench.races.race import Collector, Place
from laconic.bench.records.kinds import BASELINE, COMPUTE, Record, Status, StepRecord
from laconic.bench.records.speed import efficiency, middle


@dataclass
class StepCollector(Collector):
    """One record a case, once all its blocks are there."""

    place: Place
    batch: int
    parameters: int
    rounds: int
    workload: str | None = None
    device: str = "cpu"
    blocks: dict[str, list[Finished]] = field(default_factory=lambda: defaultdict(list))
    recorded: set[str] = field(default_factory=set)

    def hear(self, message: Message) -> Record | None:
        if isinstance(message, Failed):
            return self._record(message.case, "failed", message.error)
        if not isinstance(message, Finished):
            return None
        self.blocks[message.case].append(message)
        complete = len(self.blocks[message.case]) == self.rounds
        return self._record(message.case, "done", None) if complete else None

    def unfinished(self) -> list[Record]:
        cases = [case for case in self.blocks if case not in self.recorded]
        return [self._record(case, "interrupted", None) for case in cases]

    def _record(self, case: str, status: Status, error: str | None) -> StepRecord:
        self.recorded.add(case)
        blocks = self.blocks[case]
        steps_ms = _all_steps(blocks)
        step_ms, compute_ms = middle(steps_ms), middle(_all_steps(self.blocks.get(COMPUTE, [])))
        return StepRecord(
            spec=case,
            workers=self.place.workers,
            rate=self.place.rate,
            shaped=self.place.shaped,
            steps=len(steps_ms),
            batch=self.batch,
            parameters=self.parameters,
            status=status,
            error=error,
            command=self.place.command,
            machine=self.place.machine,
            workload=self.workload,
            device=self.device,
            step_ms=step_ms,
            compute_ms=compute_ms,
            scaling_efficiency=efficiency(compute_ms, step_ms),
            interface_bytes=middle(block.interface_bytes for block in blocks),
            backend=blocks[-1].backend if blocks else None,
            step_ms_quantiles=_quantiles(steps_ms),
            sent_bytes=middle(block.sent_bytes for block in blocks),
            ratio_to_dense=self._ratio_to_dense(steps_ms),
            encode_ms=middle(block.encode_ms for block in blocks),
            wire_ms=middle(block.wire_ms for block in blocks),
            decode_ms=middle(block.decode_ms for block in blocks),
        )

    def _ratio_to_dense(self, steps_ms: Sequence[float]) -> float | None:
        dense_ms = _all_steps(self.blocks.get(BASELINE, []))
        return median(steps_ms) / median(dense_ms) if steps_ms and dense_ms else None


def _all_steps(blocks: Iterable[Finished]) -> list[float]:
    return [step_ms for block in blocks for step_ms in block.steps_ms]


def _quantiles(steps_ms: Sequence[float]) -> tuple[float, float, float] | None:
    if not steps_ms:
        return None
    low, middle_, high = np.quantile(steps_ms, (0.2, 0.5, 0.8)).tolist()
    return low, middle_, high
