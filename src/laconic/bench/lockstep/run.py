"""One run of simulated workers as records: what was seen once, with the time on each network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from laconic.bench.hosts.job import Job
from laconic.bench.hosts.messages import Finished, Look, Message, Started
from laconic.bench.lockstep.pace import Pace
from laconic.bench.lockstep.trainee import Seen, Trainee
from laconic.bench.machine import machine_facts
from laconic.bench.races.race import Place
from laconic.bench.races.train_records import TrainCollector
from laconic.bench.records.kinds import TrainRecord
from laconic.bench.records.target import Target
from laconic.bench.work.workload import parameter_count
from laconic.comm.meter import ring_bytes


@dataclass(frozen=True)
class SimulatedRun:
    """A case that is being run; `paces` are by the links' rate."""

    job: Job
    case: str
    paces: Mapping[str, Pace]
    command: str
    facts: Mapping[str, str]
    target: Target | None = None
    compute_ms: float | None = None

    def records(self, trainee: Trainee, seen: Sequence[Seen]) -> list[TrainRecord]:
        """One a rate."""
        return [self._record(trainee, seen, rate, pace) for rate, pace in self.paces.items()]

    def _record(self, trainee: Trainee, seen: Sequence[Seen], rate: str, pace: Pace) -> TrainRecord:
        machine = {**machine_facts(), **self.facts}
        place = Place(trainee.workers, rate, True, self.command, machine)
        collector = TrainCollector(place, self.job, trainee.workload, self.target, self.compute_ms)
        for message in self._messages(trainee, seen, pace):
            record = collector.hear(message)
        assert isinstance(record, TrainRecord)
        title = f"{trainee.workload.heading} (simulated)"
        # The first steps compile kernels and record graphs, and others may be at work here too.
        lockstep_ms = min((one.lockstep_s * 1e3 for one in seen if one.losses), default=None)
        return replace(record, workload=title, simulated=True, lockstep_ms=lockstep_ms)

    def _messages(self, trainee: Trainee, seen: Sequence[Seen], pace: Pace) -> Iterator[Message]:
        """What rank 0 of a real cluster would tell."""
        yield Started(case=self.case)
        for one in seen:
            loss, metric_name, metric = one.evaluation
            yield Look(
                case=self.case,
                step=one.step,
                time_s=pace.time_s(one),
                sent_bytes=one.sent_bytes,
                loss=loss,
                metric_name=metric_name,
                metric=metric,
                losses=one.losses,
            )
        last = seen[-1]
        grad_bytes = sum(p.nbytes for p in trainee.model.parameters() if p.requires_grad)
        yield Finished(
            case=self.case,
            parameters=parameter_count(trainee.model),
            steps_ms=pace.steps_ms(last),
            sent_bytes=last.sent_bytes / last.step,
            dense_bytes=ring_bytes(grad_bytes, trainee.workers),
            **pace.split()._asdict(),
            timeline=trainee.timeline(),
        )
