"""DistributedDataParallel: one line that compresses the gradients of a DDP script."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.auto.auto import Auto, check_ranks
from gradwire.auto.link_probe import check_backend
from gradwire.auto.optimizers import counterpart_line, find_adaptive
from gradwire.base import Memory
from gradwire.comm.consistency import check_equal_tensors
from gradwire.comm.groups import check_member, lease_group
from gradwire.comm.meter import Meter
from gradwire.engine.chunks import CHUNK_BYTES
from gradwire.engine.make_plan import Tensors, make_plan
from gradwire.engine.ownership import release
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.integrations.backward_pass import BackwardPass, at_end_of_backward, graph_task
from gradwire.integrations.bucketing import PendingBucket, Ready
from gradwire.integrations.comm_runner import StreamRunner, ThreadRunner
from gradwire.integrations.dense_allreduce import start_means
from gradwire.integrations.handle import Handle, Planner
from gradwire.integrations.hook_slot import HookSlot, release_orphans, take_slot
from gradwire.integrations.native_passes import NativePasses
from gradwire.integrations.parameters import COMPILED, check_dense
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.integrations.unused_parameters import UnusedParameters
from gradwire.policies import MethodSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("gradwire")


class LossScaleHook:
    """Reads the loss scale before each forward pass; does nothing in a copy of the model."""

    def __init__(
        self, link: "Link | None" = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self._link, self._scaler = link, scaler

    def __call__(self, *_: object) -> None:
        # A checkpointed model runs forward inside backward, at the same scale as before.
        if self._link is not None and self._scaler is not None and not self._link._is_in_backward():
            # Before the forward pass the GPU has little left to do, so a sync costs little.
            self._link._follow(self._scaler.get_scale())

    def __reduce__(self) -> tuple[type["LossScaleHook"], tuple[()]]:
        return LossScaleHook, ()


class Link(Handle):
    """A DDP model whose gradients go through Gradwire, until `detach`."""

    has_slot = True
    overlaps = True

    def __init__(
        self,
        slot: HookSlot,
        model: DDP,
        group: dist.ProcessGroup,
        names: dict[nn.Parameter, str],
        settings: Settings,
        unused: UnusedParameters | None,
        planner: Planner,
        adaptive: bool | None,
    ) -> None:
        self._slot = slot
        # The model must not live longer for its link.
        self._model = ref(model)
        self._unused = unused
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        # A group of our own: collectives from our thread must not mix with others'.
        self._lease = lease_group(group, slot.device)
        try:
            Handle.__init__(
                self,
                self._lease.group,
                tensors,
                names,
                planner,
                settings,
                discards_lanes=unused is not None,
                adaptive=adaptive,
            )
            runner = StreamRunner if self._comm.on_device else ThreadRunner
            self._runner = runner(slot.device, self._comm)
        except PeerError:
            # A collective failed in this group, which closes its connections: nobody leases it.
            raise
        except Exception:
            release(names, self)
            self._lease.release()
            raise
        self._pass = BackwardPass()
        self._has_last_bucket = False
        self._late_error: NonFiniteError | None = None
        self._computed_s = 0.0
        self._hooks: list[RemovableHandle] = []
        self._native: NativePasses | None = None
        """Counts passes while DDP's own reducer averages the gradients, which needs no hook."""
        if not slot.is_registered and group is model.process_group and self._may_be_native():
            self._native = NativePasses(model, names, self._pass, unused)
        else:
            slot.register(model)

    def _may_be_native(self) -> bool:
        """Returns whether DDP's own reducer can average the gradients as the settings require."""
        # An observer may ask for messages in later steps.
        others = self._buckets.least_bytes > 0 or self._engine.observer is not None
        return self._is_plain_mean() and not others and self._check_every == 0

    def _prepare_own_exchange(self, requester: str) -> Callable[[], None]:
        native, model = self._native, self._model()
        if native is None:
            return lambda: None
        if model is not None:
            self._slot.check_free(model, requester)

        def begin() -> None:
            if model is not None:
                self._slot.register(model)
            native.stop()
            self._native = None
            # A rank that joined early has counted fewer passes.
            self._agree_on_steps()

        return begin

    def _count_framework_passes(self) -> None:
        if self._native is None:
            return
        counts, unused = self._native.take()
        for passes, buckets, bucket_bytes in counts:
            self._engine.count_dense_passes(passes, bucket_bytes)
            self._passes += passes
            for nbytes in bucket_bytes:
                self._comm.meter.add_means(nbytes, self._comm.size, passes)
            self._buckets.record(buckets)
        for name, passes in unused.items():
            self._engine.set_steps({name: self._engine.steps_of(name) - passes})
        if counts:
            last = Meter()
            for nbytes in counts[-1].bucket_bytes:
                last.mean(nbytes, self._comm.size)
            self._last_step.end_uncounted(last, self._engine.dense_bytes)

    def _close(self) -> None:
        self._slot.link = None
        if self._native is not None:
            self._native.stop()
        for hook in self._hooks:
            hook.remove()
        self._runner.close()
        if not self._runner.has_failed():
            self._lease.release()

    def _is_attached(self) -> bool:
        return self._slot.link is self

    def _is_in_backward(self) -> bool:
        return self._pass.is_running()

    def _follow_loss_scale(self, model: DDP, scaler: torch.amp.GradScaler) -> None:
        self._hooks.append(model.register_forward_pre_hook(LossScaleHook(self, scaler)))

    def _follow(self, scale: float) -> None:
        """Converts residuals to this loss scale; DDP's own reducer leaves none."""
        if self._native is None or scale != self._engine.loss_scale:
            self.loss_scale_changed(scale)

    def _owns(self, parameter: Tensor) -> bool:
        return parameter in self._parameters

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Starts the exchange of a bucket; the future completes when its buffer holds the mean."""
        with self._lock:
            if bucket.index() == 0:
                self._complete_step()
            self._pass.note_bucket()
            return self._start(bucket)

    def _start(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        is_last = self._has_last_bucket = bucket.is_last()
        names = [self._parameters[p] for p in bucket.parameters()]
        pending = PendingBucket(names, bucket.gradients(), bucket.buffer(), self._runner.future())
        plain = self._is_plain_mean()
        nbytes = pending.buffer.nbytes if plain else self._engine.message_bytes(names)
        ready = self._buckets.add(pending, nbytes, is_last)
        if ready is not None and plain:
            self._start_plain_means(ready, is_last)
        elif ready is not None:
            # Created in autograd's thread: `bucket_programs` commits the previous step, which must
            # not happen while the runner uses the lanes.
            programs = [
                program
                for message in ready.messages
                for program in self._engine.bucket_programs(*message)
            ]
            self._runner.submit(programs, ready.buckets, is_last=is_last)
        if is_last:
            self._end_step_after_backward()
        return pending.future

    def _start_plain_means(self, ready: Ready, is_last: bool) -> None:
        for bucket in ready.buckets:
            self._engine.count_dense_bucket(bucket.names, bucket.buffer.nbytes)
        self._runner.start(lambda: start_means(self._comm, ready), ready.buckets)
        if is_last:
            # Now, since with a static graph DDP waits for them before our callback runs.
            self._runner.flush()

    def _end_step_after_backward(self) -> None:
        """Makes `backward` end the step, and raise the errors of its exchanges.

        Called with the last bucket: earlier ones may be handed over in graph tasks of their own,
        which end before the backward pass does. The order at the end of a pass:
        `_backward_computed`, `_end_backward`, in which the runner waits for its tasks and runs
        `_end_exchanges` (`Engine.end_step`), then `_commit` (`Engine.commit_step`).
        """
        if graph_task() is None:
            # DDP's join calls the hook outside a backward pass.
            self._computed_s = perf_counter()
            self._end_backward(joined=True)
        else:
            # Queued from a callback, so that it runs after DDP's own.
            at_end_of_backward(self._backward_computed)

    def _backward_computed(self) -> None:
        self._computed_s = perf_counter()
        at_end_of_backward(self._end_backward)

    def _end_backward(self, joined: bool = False) -> None:
        with self._lock:
            self._pass.end()
            self._runner.end_step(self._end_exchanges)
            self._comm.meter.waited_s += perf_counter() - self._computed_s
            self._last_step.end(self._engine.dense_bytes)
            if self._unused is not None:
                self._unused.note_pass(is_map_reduced=not joined)
            late, self._late_error = self._late_error, None
            error = self._commit(wait=False)
        if late is not None:
            raise late from error
        if error is not None:
            raise error

    def _commit(self, *, wait: bool) -> NonFiniteError | None:
        """Commits the last step, but not for parameters that no rank used: DDP drops their means.

        Without `wait` it may leave that to the next call, as `Engine.commit_step` does.
        """
        if self._unused is not None:
            if self._unused.pending and not wait and self._engine.nan_policy != "raise":
                return None
            for name in self._unused.take():
                for lane in self._engine.lanes_of(name):
                    lane.discard()
        return self._engine.commit_step(wait=wait)

    def _complete_step(self) -> None:
        """Ends the last step; its error, if it is a late one, is raised by the next backward.

        If another callback raised first, ours did not run. If a pass was interrupted before its
        last bucket, DDP has not returned its means, so its state is discarded.
        """
        if self._native is not None:
            self._pass.end()
            self._count_framework_passes()
        elif self._pass.has_begun:
            self._pass.end()
            try:
                self._runner.end_step(self._engine.end_step)
            except PeerError:
                # The next backward raises it again; until then the state can be saved.
                log.warning("a backward pass was interrupted, and its exchange failed")
                return
            self._passes += 1
            if self._has_last_bucket and self._unused is not None:
                self._unused.note_pass(is_map_reduced=True)
            elif not self._has_last_bucket:
                self._buckets.abandon()
                for lane in self._engine.lanes.values():
                    lane.discard()
        self._late_error = self._commit(wait=True) or self._late_error

    def _end_exchanges(self) -> None:
        self._engine.end_step()
        if self._is_check_due():
            check_equal_tensors(self._check_comm, self._engine.tensors)


def attach(
    model: DDP,
    compressor: MethodSpec | Auto | Settings,
    *,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: "Unpack[Options]",
) -> Link:
    """Compresses the gradients of a DDP model from the next backward pass on.

    Called on all ranks of the model's group, which check that they agree. The options are the
    fields of `Settings`: memory, exchange, seed, nan_policy, check_every, checksum, controller,
    cuda_graphs, least_bytes, chunk_bytes. Before every forward pass the loss scale is read from
    `scaler`, and residuals follow it. With "auto" the method is chosen from measurements
    (docs/explanation/auto.md); the `optimizer` that trains the model decides which methods are
    admitted.
    """
    settings = settings_of(compressor, options)
    adaptive = find_adaptive(settings.auto(), optimizer)
    link = attach_planned(model, settings, None, adaptive, process_group, scaler)
    if adaptive and optimizer is not None:
        _log_counterpart(link, settings, optimizer, with_scaler=scaler is not None)
    return link


def _log_counterpart(
    link: Link, settings: Settings, optimizer: torch.optim.Optimizer, *, with_scaler: bool
) -> None:
    """Logs the line that compresses updates, which no hook of the model can do.

    The optimiser computes its update from the mean gradient, after the exchange; only an optimiser
    of ours computes each worker's own update before it.
    """
    config = settings.auto()
    assert config is not None
    line = counterpart_line(config, optimizer, with_scaler=with_scaler)
    if line is not None and link._comm.rank == 0:
        kind = type(optimizer).__name__
        log.info(
            "auto: sparse gradients stall %s, so they are not admitted; to exchange its updates, "
            "which may be sparse, leave attach out and use: %s",
            kind,
            line,
        )


def attach_planned(
    model: DDP,
    settings: Settings,
    adapt: Callable[[Plan], Plan] | None,
    adaptive: bool | None,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Link:
    """Attaches a model, as `attach` does, with plans that the caller checks and changes.

    `adaptive` is whether what is exchanged goes through an adaptive optimiser, None if unknown.
    """
    release_orphans()
    names = trained_parameters(model)
    group = model.process_group if process_group is None else process_group
    check_member(group)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ConfigError(f"attach: scaler must be a GradScaler, with get_scale(), got {scaler!r}")
    # Before the slot is taken, which cannot be undone.
    tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
    planner = _planner(tensors, settings, next(model.parameters()).device, adapt)
    planner(settings.first_method(), settings.memory, settings.exchange, tensors, group.size())
    if settings.auto() is not None:
        check_ranks(group.size())
        check_backend(dist.get_backend(group))
    drops_unused = model.find_unused_parameters or model.static_graph
    unused = UnusedParameters(model, names) if drops_unused else None
    slot = take_slot(model)
    slot.link = link = Link(slot, model, group, names, settings, unused, planner, adaptive)
    if scaler is not None:
        link._follow_loss_scale(model, scaler)
    return link


def _planner(
    tensors: Mapping[str, Tensor],
    settings: Settings,
    device: torch.device,
    adapt: Callable[[Plan], Plan] | None,
) -> Planner:
    """Returns the function that makes the link's plans, which cut large parameters into chunks."""

    def planner(
        compressor: MethodSpec,
        memory: Memory | str | None,
        exchange: str,
        all_tensors: Tensors,
        size: int,
    ) -> Plan:
        plan = make_plan(compressor, memory, exchange, all_tensors, size)
        if adapt is not None:
            plan = adapt(plan)
        if settings.chunk_bytes is not None:
            return plan.in_chunks(tensors, settings.chunk_bytes)
        # Only where the pipeline encodes one chunk while another is on the wire.
        return replace(plan, chunk_bytes=CHUNK_BYTES if device.type == "cpu" else 0)

    return planner


def trained_parameters(model: DDP) -> dict[nn.Parameter, str]:
    """Returns the parameters whose gradients DDP exchanges, in order."""
    if not dist.is_initialized():
        raise ConfigError(
            "attach: there is no process group; call torch.distributed.init_process_group, then "
            "wrap the model in DistributedDataParallel, then attach to that"
        )
    if not isinstance(model, DDP):
        hint = _hint_at_ddp(model)
        raise ConfigError(
            f"attach: expected a DistributedDataParallel, got {type(model).__name__}; {hint}"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "attach: DDP with skip_all_reduce_unused_params=True leaves out buckets, the last one "
            "included; freeze the unused parameters before DDP is made instead"
        )
    check_dense(model.module)
    named = model.module.named_parameters()
    return {p: n for n, p in named if p.requires_grad and n not in model.parameters_to_ignore}


def _hint_at_ddp(model: object) -> str:
    """Returns what to pass to `attach` in place of a model that is no DDP object."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    paths = [path for path, module in modules if isinstance(module, DDP)]
    if paths == [COMPILED.rstrip(".")]:
        return "attach to the DDP object that was compiled, and train with the compiled one"
    if paths:
        return f"attach to the DDP object inside it, its .{paths[0]}"
    return "wrap the model in it first; without DDP use gradwire.Reducer, with FSDP2 attach_fsdp"
