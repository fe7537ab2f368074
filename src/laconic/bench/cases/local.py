"""A case whose workers take steps of their own and talk now and then."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from laconic.bench.case import Case, Mounted, Traffic
from laconic.bench.cases.local_methods import Around, Rhythm, parse_local
from laconic.local.peers import simulated
from laconic.local.steps import LocalSteps

_MANY_LAYERS = 64
"""More than anybody divides a model into."""


@dataclass(frozen=True)
class LocalCase(Case):
    """`topk:ratio=0.01 @ local=(qsparse:sync_every=8)`: a method of ours inside a local one."""

    spec: str
    local: str
    exchange: str = "auto"

    def __post_init__(self) -> None:
        # What cannot go together refuses here, and not on every host.
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(_MANY_LAYERS)))
        self.build(Around(model, SGD(model.parameters(), lr=0.1), simulated(2)[0], 0))

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        held = ExitStack()
        held.enter_context(ddp.no_sync())
        steps = self.build(Around(ddp.module, optimizer, ddp.process_group, seed))
        held.enter_context(steps)
        return _AtWork(
            optimizer,
            steps,
            held,
            averaged=steps.averaged,
            period=parse_local(self.local).sync_every,
            rest=self.rhythm().delay,
        )

    def build(self, around: Around) -> LocalSteps:
        """The local method around one worker's optimiser."""
        return parse_local(self.local).build(self.spec, self.exchange, around)

    def rhythm(self) -> Rhythm:
        """How often workers talk, and how late they listen."""
        return parse_local(self.local).rhythm()


@dataclass(frozen=True)
class _AtWork(Mounted):
    steps: LocalSteps
    held: ExitStack

    def traffic(self, steps: int) -> Traffic:
        stats = self.steps.stats()
        return Traffic(
            sent_bytes=float(cast(int, stats["sent_bytes"])),
            encode_s=cast(float, stats["encode_s"]),
            wire_s=cast(float, stats["wire_s"]),
            decode_s=cast(float, stats["decode_s"]),
            backend=str(stats["backend"]),
        )

    def epoch_ended(self, learning_rate: float) -> None:
        """Local methods know no epochs."""

    def close(self) -> None:
        self.held.close()
