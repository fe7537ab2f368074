"""Fast path for dense gradients: the gradients themselves are the messages.

The all-reduce starts as soon as the gradients are ready, while others are in flight. It needs no
collective program and, where the gradients are contiguous already, no copy.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.integrations.bucketing import Ready
from gradwire.integrations.comm_runner import Task
from gradwire.wire.layout import join, split


def start_mean(comm: ProcessGroupComm, gradients: Sequence[Tensor]) -> Task:
    """Begins to replace gradients by their mean over ranks; the errand is to see it done."""
    flat = join(gradients)
    if not flat.numel():
        return lambda: None
    wait = comm.start_mean(flat)

    def finish() -> None:
        wait()
        if flat.data_ptr() != gradients[0].data_ptr():
            torch._foreach_copy_(list(gradients), split(flat, gradients))

    return finish


def start_means(comm: ProcessGroupComm, ready: Ready) -> Task:
    """The same for buckets of DDP: entries as they lie there, which is alike on all ranks."""
    [(names, _), *others] = ready.messages
    if not others and names is ready.loads[0].names:
        return start_mean(comm, [ready.loads[0].buffer])
    ends = [start_mean(comm, [_lying(g) for g in grads]) for _, grads in ready.messages]
    return lambda: one_ahead(ends)


def _lying(gradient: Tensor) -> Tensor:
    return gradient.as_strided((gradient.numel(),), (1,))


def one_ahead(errands: Iterable[Task]) -> None:
    """Runs errands one after the other; the next one is begun before one is awaited."""
    before: Task | None = None
    for errand in errands:
        if before is not None:
            before()
        before = errand
    if before is not None:
        before()


def own_row(table: Tensor, out: Tensor, scale: float) -> CollectiveProgram[None]:
    """Writes the mean of a rank's own row of all ranks' tables into `out`, times `scale`."""
    rows = list(table.view(torch.uint8))  # [ranks, bytes of a row]
    heard = yield Collective("scatter", rows, [row.numel() for row in rows])
    total = heard[0].view(table.dtype).to(torch.float32)
    for row in heard[1:]:
        total.add_(row.view(table.dtype))
    torch.mul(total, scale / len(rows), out=out)
