"""DistributedDataParallel: one line that compresses the gradients of a DDP script."""

from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.base import Compressor
from gradwire.comm.base import CollectiveProgram, run_program
from gradwire.comm.consistency import check_equal_tensors
from gradwire.comm.groups import check_member, lease_group
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.bucketing import PendingBucket, Ready
from gradwire.integrations.comm_runner import StreamRunner, ThreadRunner
from gradwire.integrations.dense_allreduce import start_means
from gradwire.integrations.handle import Handle, at_end_of_backward
from gradwire.integrations.parameters import check_dense
from gradwire.integrations.settings import Options, Settings, settings_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HookSlot:
    """DDP's only communication hook, which cannot be removed; but the link behind it can change."""

    def __init__(self, model: DDP) -> None:
        self.device = next(model.parameters()).device
        self.dense_group = model.process_group
        self.link: Link | None = None


# Weak keys, so that this table does not keep models alive.
_slots: WeakKeyDictionary[DDP, HookSlot] = WeakKeyDictionary()

_orphans: list[HookSlot] = []
"""Slots whose model died attached. The garbage collector may hold any lock, so it only appends."""


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _hook(state: HookSlot, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP calls this once a bucket, in the same order on every rank."""
    if isinstance(bucket, tuple):
        raise ConfigError(
            "compiled autograd's python_reducer hands over single gradients instead of buckets; "
            "set torch._dynamo.config.optimize_ddp = True"
        )
    if state.link is None:
        return allreduce_hook(state.dense_group, bucket)
    return state.link._reduce(bucket)


class Link(Handle):
    """A DDP model whose gradients go through Gradwire, until `detach`."""

    has_slot = True
    overlaps = True

    def __init__(
        self,
        slot: HookSlot,
        group: dist.ProcessGroup,
        names: dict[nn.Parameter, str],
        settings: Settings,
    ) -> None:
        self._slot = slot
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        # A group of our own: collectives from our thread must not mix with others'.
        self._lease = lease_group(group, slot.device)
        try:
            Handle.__init__(self, self._lease.group, tensors, names, make_plan, settings)
        except ConfigError:
            self._lease.release()
            raise
        self._in_backward = False
        self._computed_s = 0.0
        runner = StreamRunner if self._comm.on_device else ThreadRunner
        self._runner = runner(slot.device)
        self._hooks: list[RemovableHandle] = []

    def _close(self) -> None:
        self._slot.link = None
        for hook in self._hooks:
            hook.remove()
        self._runner.close()
        if not self._runner.has_failed():
            self._lease.release()

    def _is_attached(self) -> bool:
        return self._slot.link is self

    def _follow_loss_scale(self, model: DDP, scaler: torch.amp.GradScaler) -> None:
        def read(*_: object) -> None:
            # Before the forward pass the GPU has little left to do, so a sync costs little.
            self.loss_scale_changed(scaler.get_scale())

        self._hooks.append(model.register_forward_pre_hook(read))

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Starts the exchange of a bucket; the future completes when its buffer holds the mean."""
        is_last = bucket.is_last()
        if self._in_backward and bucket.index() == 0:
            self._end_interrupted_step()
        names = [self._parameters[p] for p in bucket.parameters()]
        pending = PendingBucket(names, bucket.gradients(), bucket.buffer(), self._runner.future())
        plain = self._is_plain_mean()
        nbytes = pending.buffer.nbytes if plain else self._engine.message_bytes(names)
        ready = self._buckets.add(pending, nbytes, is_last)
        if ready is not None and plain:
            self._start_plain_means(ready, is_last)
        elif ready is not None:
            # Created in autograd's thread: `bucket_program` commits the previous step, which must
            # not happen while the runner uses the lanes.
            programs = [self._engine.bucket_program(*message) for message in ready.messages]
            self._runner.submit(lambda: self._run(programs), ready.buckets)
        self._end_step_after_backward(is_last)
        return pending.future

    def _run(self, programs: list[CollectiveProgram[None]]) -> None:
        for program in programs:
            run_program(program, self._comm)

    def _start_plain_means(self, ready: Ready, is_last: bool) -> None:
        for bucket in ready.buckets:
            self._engine.count_dense_bucket(bucket.names, bucket.buffer.nbytes)
        self._runner.start(lambda: start_means(self._comm, ready), ready.buckets)
        if is_last:
            # Now, since with a static graph DDP waits for them before our callback runs.
            self._runner.flush()

    def _end_step_after_backward(self, is_last: bool) -> None:
        """Makes `backward` end the step, and raise the errors of its exchanges.

        The order at the end of a pass: `_backward_computed`, `_end_backward`, in which the runner
        waits for its tasks and runs `_end_exchanges` (`Engine.end_step`), then `_end_step`
        (`Engine.commit_step`).
        """
        if torch._C._current_graph_task_id() == -1:
            # DDP's join calls the hook outside a backward pass.
            if is_last:
                self._computed_s = perf_counter()
                self._end_backward()
        elif not self._in_backward:
            self._in_backward = True
            # Queued from a callback, so that it runs after DDP's own.
            at_end_of_backward(self._backward_computed)

    def _backward_computed(self) -> None:
        self._computed_s = perf_counter()
        at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._runner.end_step(self._end_exchanges)
        self._comm.meter.waited_s += perf_counter() - self._computed_s
        self._end_step()

    def _end_interrupted_step(self) -> None:
        """Ends the previous pass, whose callbacks never ran because another one raised."""
        self._in_backward = False
        self._runner.end_step(self._end_exchanges)
        self._engine.commit_step(wait=False)

    def _end_exchanges(self) -> None:
        self._engine.end_step()
        if self._is_check_due():
            check_equal_tensors(self._comm, self._engine.tensors)


def attach(
    model: DDP,
    compressor: Compressor | str | Settings,
    *,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: "Unpack[Options]",
) -> Link:
    """Compresses the gradients of a DDP model from the next backward pass on.

    Called on all ranks of the model's group, which check that they agree. The options are the
    fields of `Settings`: memory, exchange, seed, nan_policy, check_every, checksum, controller,
    cuda_graphs, least_bytes. Before every forward pass the loss scale is read from `scaler`, and
    residuals follow it.
    """
    while _orphans:
        _release(_orphans.pop())
    settings = settings_of(compressor, options)
    names = _names(model)
    group = model.process_group if process_group is None else process_group
    check_member(group)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ConfigError(f"attach: scaler must be a GradScaler, with get_scale(), got {scaler!r}")
    # Before the slot is taken, which cannot be undone.
    make_plan(settings.compressor, settings.memory, settings.exchange, names, group.size())
    slot = _take_slot(model)
    slot.link = Link(slot, group, names, settings)
    if scaler is not None:
        slot.link._follow_loss_scale(model, scaler)
    return slot.link


def _names(model: DDP) -> dict[nn.Parameter, str]:
    """Returns the parameters whose gradients DDP exchanges, in order."""
    if not isinstance(model, DDP):
        raise ConfigError(f"attach: expected a DistributedDataParallel, got {type(model).__name__}")
    check_dense(model.module)
    named = model.module.named_parameters()
    return {p: n for n, p in named if p.requires_grad and n not in model.parameters_to_ignore}


def _take_slot(model: DDP) -> HookSlot:
    if model not in _slots:
        occupant = model._get_ddp_logging_data().get("comm_hook")
        if model.mixed_precision is not None:
            occupant = "DDP's mixed_precision"
        if occupant:
            raise ConfigError(f"attach: the model's only hook slot is taken by {occupant}")
        slot = HookSlot(model)
        model.register_comm_hook(slot, _hook)
        _slots[model] = slot
        finalize(model, _orphans.append, slot).atexit = False
    if _slots[model].link is not None:
        raise ConfigError("attach: this model has a link already; switch or detach that one")
    return _slots[model]


def _release(slot: HookSlot) -> None:
    """Releases the link of a model that died attached."""
    if slot.link is not None:
        slot.link._release()
