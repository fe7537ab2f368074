"""The dense fast path: averages gradients without encoding, residual or non-finite flag.

The all-reduce starts as soon as the gradients are ready, while others are under way, and needs no
copy if they lie side by side already.
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
    """Starts to replace gradients by their mean over ranks; the returned task completes it."""
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
    """Starts the means of DDP buckets; entries as they lie in memory, which all ranks share."""
    [(names, _), *others] = ready.messages
    if not others and names is ready.buckets[0].names:
        return start_mean(comm, [ready.buckets[0].buffer])
    tasks = [
        start_mean(comm, [g.as_strided((g.numel(),), (1,)) for g in grads])
        for _, grads in ready.messages
    ]
    return lambda: run_one_ahead(tasks)


def run_one_ahead(tasks: Iterable[Task]) -> None:
    """Runs tasks in order; makes (and so starts) the next one before it runs one."""
    previous: Task | None = None
    for task in tasks:
        if previous is not None:
            previous()
        previous = task
    if previous is not None:
        previous()


def reduce_scatter_mean(table: Tensor, out: Tensor, scale: float) -> CollectiveProgram[None]:
    """Writes `scale` times the mean over ranks of this rank's row of the table into `out`."""
    rows = list(table.view(torch.uint8))  # [ranks, bytes of a row]
    received = yield Collective("all_to_all", rows, [row.numel() for row in rows])
    total = received[0].view(table.dtype).to(torch.float32)
    for row in received[1:]:
        total.add_(row.view(table.dtype))
    torch.mul(total, scale / len(rows), out=out)
