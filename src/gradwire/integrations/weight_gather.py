"""FSDP2's parameter all-gather with compressed weights, which all ranks decode alike.

As in ZeRO++ (qwZ, arXiv:2306.10209) and QSDP (arXiv:2302.02390), every rank encodes its shard block
by block and keeps it in full precision for the optimiser. The owner computes with the decoded
values too, so that weights are equal on all ranks. They have no residual, since the optimiser reads
the master weights: so only methods are admissible that bound the error of every entry.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from math import inf
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base import Compressor, OneRound, flat32
from gradwire.comm.base import CollectiveProgram, run_program
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import PendingCollective, ProcessGroupComm
from gradwire.compressors._cast import Cast
from gradwire.compressors._quantizer import Quantizer
from gradwire.engine.batching import batches
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import plan_for
from gradwire.engine.plan import DENSE, Plan
from gradwire.engine.step import SAMPLE_EVERY
from gradwire.errors import ConfigError
from gradwire.identity import check_saved_identity
from gradwire.integrations.backward_pass import graph_task
from gradwire.integrations.fsdp_private import AllGather, GatheredUnit
from gradwire.policies import MethodSpec, find_policies
from gradwire.spec import compressor_of, format_spec
from gradwire.types import AllGather as GatherRequest
from gradwire.types import EncodeContext, Parts

MOST_ERROR = 1 / 7
"""Largest admissible error of an entry, relative to the largest of its block: four bits, rounded at
random."""


def weights_plan(given: MethodSpec, units: Sequence[GatheredUnit], size: int) -> Plan:
    """Returns the method of every gathered parameter; raises ConfigError for inadmissible ones."""
    policies = find_policies(given)
    if policies is None:
        _check_admissible(compressor_of(given))  # type: ignore[arg-type]
    for policy in () if policies is None else policies.policies:
        _check_admissible(policy.compressor)
        if policy.memory is not None or policy.exchange is not None:
            raise ConfigError(
                f"weights: policy {policy.pattern!r} sets a memory or an exchange, but weights are "
                "gathered without any; leave them out"
            )
    forms = {name: form for unit in units for name, form in _forms(unit).items()}
    for name, form in forms.items():
        if form.dtype not in DENSE:
            raise ConfigError(f"weights: {name!r} is {form.dtype}; expected {[*DENSE]}")
    return plan_for(given, "none", lambda _: "gather", forms, size)


def largest_error(compressor: Compressor) -> float:
    """Upper bound of an entry's error, relative to the largest of its block; inf without any."""
    if isinstance(compressor, Quantizer):
        return compressor.rounding_spec().largest_error
    if isinstance(compressor, Cast) and compressor.dtype != torch.float16:
        return float(torch.finfo(compressor.dtype).eps) / 2
    return inf


def _check_admissible(compressor: Compressor) -> None:
    error = largest_error(compressor)
    if error <= MOST_ERROR:
        return
    reason = "nothing bounds the error of an entry"
    if error < inf:
        reason = f"an entry may be off by {error:.2g} of the largest of its block"
    raise ConfigError(
        f"weights: {format_spec(compressor)} compresses weights below what its bound allows: "
        f"{reason}, where at most {MOST_ERROR:.2g} is admissible, since no residual makes up for "
        "it; use 'int8', 'fp8', 'eightbit', 'int4', 'qsgd:bits=4', 'bf16' or 'none'"
    )


class _Request(NamedTuple):
    """An all-gather as FSDP2 requests it, and the one that it would have made."""

    before: AllGather
    out: Tensor
    own: Tensor
    """A view of this rank's part of the output."""
    group: dist.ProcessGroup
    asynchronous: bool


class WeightGather:
    """The all-gathers of a model's units, with their bytes, and the step that keys their numbers.

    The step advances before the first all-gather that follows an exchange of gradients, outside a
    backward pass. So all of one optimiser step, in forward, in backward and when activations are
    computed again, decode to the same weights.
    """

    def __init__(
        self,
        units: list[GatheredUnit],
        plan: Plan,
        comm: ProcessGroupComm,
        engine: Engine,
    ) -> None:
        self._units, self._plan, self._comm, self._engine = units, plan, comm, engine
        self._before = [unit.all_gather() for unit in units]
        self._step, self._step_ended = 0, False
        self._lanes = {unit.title: self._open_lanes(unit) for unit in units}
        self._sent_bytes = self._received_bytes = self._calls = self._dense_bytes = 0
        # By unit: the step of the last sample, and squared norms of its error and weights.
        self._samples: dict[str, tuple[int, Tensor]] = {}

    def attach(self) -> None:
        for unit, before in zip(self._units, self._before, strict=True):
            unit.set_all_gather(_AllGatherHook(self, unit, before))

    def detach(self) -> None:
        for unit, before in zip(self._units, self._before, strict=True):
            unit.set_all_gather(before)

    def end_step(self) -> None:
        """Notes that gradients were exchanged."""
        self._step_ended = True

    def stats(self) -> dict[str, object]:
        """Returns what of the bytes of both legs is that of the weights."""
        norms = [norms for _, norms in self._samples.values()]
        error, size = torch.stack(norms).sum(0).tolist() if norms else (0.0, 0.0)
        return {
            "weights": self._plan.spec(),
            "weight_sent_bytes": self._sent_bytes,
            "weight_received_bytes": self._received_bytes,
            "weight_dense_bytes": self._dense_bytes,
            "weight_calls": self._calls,
            "weight_relative_error": (error / size) ** 0.5 if size else 0.0,
        }

    def state(self) -> dict[str, object]:
        return {"weights": json.dumps(self._plan.identity()), "weight_step": self._next_step()}

    def check(self, state: Mapping[str, object]) -> int:
        """Returns the step of a saved state; raises ConfigError if it has other weights or none."""
        step = state.get("weight_step")
        if not isinstance(step, int) or "weights" not in state:
            raise ConfigError(
                f"state: was saved without weights=, expected {self._plan.spec()!r}; attach without"
            )
        check_saved_identity("weights", state["weights"], self._plan.identity())
        return step

    def load(self, state: Mapping[str, object]) -> None:
        self._step, self._step_ended = self.check(state), False

    def _next_step(self) -> int:
        return self._step + self._step_ended

    def gather(self, unit: GatheredUnit, request: "_Request") -> dist.Work | None:
        """Fills the output with the decoded shards of all ranks."""
        counted = replace(self._comm.meter)
        self._count_dense(request)
        if graph_task() is None:
            self._step, self._step_ended = self._next_step(), False
        work = None
        if self._plan.is_dense or request.group.size() != self._comm.size:
            # After reshard_after_forward=k, backward gathers decoded weights among k ranks.
            work = self._pass_on(request)
        else:
            self._check_form(unit, request.own)
            program = self._program(unit, request.out, request.own)
            if request.asynchronous:
                work = self._start(program)
            else:
                run_program(program, self._comm)
        self._count(self._comm.meter.since(counted))
        return work

    def _pass_on(self, request: "_Request") -> dist.Work | None:
        """Runs the all-gather that FSDP2 would have made."""
        before, out, own, group, asynchronous = request
        start_s = perf_counter()
        work = before(out, own, group, asynchronous)
        self._comm.meter.gather(own.nbytes, group.size())
        self._comm.meter.add_time(0.0, perf_counter() - start_s, 0.0)
        return work

    def _start(self, program: CollectiveProgram[None]) -> dist.Work:
        start_s = perf_counter()
        collective = next(program)
        self._comm.meter.add_time(perf_counter() - start_s, 0.0, 0.0)
        return _Decoding(program, self._comm.start(self._comm.stage(collective)), self._comm.meter)

    def _program(self, unit: GatheredUnit, out: Tensor, own: Tensor) -> CollectiveProgram[None]:
        """Encodes this rank's shard, and decodes those of all ranks into `out`."""
        size, sampled = self._comm.size, self._is_sampled(unit)
        lanes = [(codec, ctx._replace(step=self._step)) for codec, ctx in self._lanes[unit.title]]
        lengths = [ctx.numel for _, ctx in lanes]
        original = own.to(torch.float32, copy=True) if sampled else own
        requests = {}
        for i, (piece, (codec, ctx)) in enumerate(zip(own.split(lengths), lanes, strict=True)):
            layout = codec.layout(ctx.numel)
            parts = codec.compress(flat32(piece), ctx)
            requests[i] = GatherRequest(parts, layout, [layout] * size)
        # Packs them, for decoding overwrites `own`.
        [batch] = batches(requests)
        received = [] if batch.collective is None else (yield batch.collective)
        answers = batch.unbatch(received)
        for i, column in enumerate(out.view(size, -1).split(lengths, dim=1)):
            codec, ctx = lanes[i]
            for row, message in zip(column, answers[i], strict=True):
                _decode(codec, row, message, ctx)
        if sampled:
            error = (own - original).square().sum()
            self._samples[unit.title] = (self._step, torch.stack([error, original.square().sum()]))

    def _open_lanes(self, unit: GatheredUnit) -> list[tuple[OneRound, EncodeContext]]:
        """Returns the method and the context of each parameter of a unit."""
        lanes = []
        rank, size, seed = self._comm.rank, self._comm.size, self._engine.seed
        for name, form in _forms(unit).items():
            codec, _ = self._plan.method_of(name).choice(form, self._plan.min_numel)
            assert isinstance(codec, OneRound)
            lane_id = crc32(f"weights of {name}".encode())
            lanes.append((codec, EncodeContext(tuple(form.shape), rank, size, seed, lane_id)))
        return lanes

    def _is_sampled(self, unit: GatheredUnit) -> bool:
        """Returns whether to measure the error, at the first all-gather of one step in many."""
        last, _ = self._samples.get(unit.title, (-1, None))
        return self._step % SAMPLE_EVERY == 0 and last != self._step

    def _check_form(self, unit: GatheredUnit, own: Tensor) -> None:
        numel = sum(ctx.numel for _, ctx in self._lanes[unit.title])
        if own.dtype != unit.dtype or own.numel() != numel:
            raise ConfigError(
                f"weights: {unit.title} gathers {own.numel()} entries of {own.dtype}, expected "
                f"{numel} of {unit.dtype}: the model has changed since attach_fsdp; detach before "
                "that, and attach again"
            )

    def _count_dense(self, request: "_Request") -> None:
        nbytes = (request.group.size() - 1) * request.own.nbytes
        self._dense_bytes += nbytes
        self._engine.dense_bytes += nbytes

    def _count(self, counted: Meter) -> None:
        self._sent_bytes += counted.sent_bytes
        self._received_bytes += counted.received_bytes
        self._calls += counted.calls


class _AllGatherHook:
    """Performs a unit's all-gather when FSDP2 requests one."""

    def __init__(self, weights: WeightGather, unit: GatheredUnit, before: AllGather) -> None:
        self._weights, self._unit, self._before = weights, unit, before

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._before.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        request = _Request(self._before, output_tensor, input_tensor, group, async_op)
        return self._weights.gather(self._unit, request)


class _Decoding(dist.Work):
    """An all-gather that was started, whose messages are decoded by whoever waits for it."""

    def __init__(
        self, program: CollectiveProgram[None], pending: PendingCollective, meter: Meter
    ) -> None:
        dist.Work.__init__(self)
        self._program, self._pending, self._meter = program, pending, meter
        self._has_ended = False

    def is_completed(self) -> bool:
        return self._has_ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._has_ended:
            self._has_ended = True
            received, start_s = self._pending.wait(), perf_counter()
            with suppress(StopIteration):
                self._program.send(received)
            self._meter.add_time(0.0, 0.0, perf_counter() - start_s)
        return True


def _forms(unit: GatheredUnit) -> dict[str, Tensor]:
    """Returns tensors of the shapes and the type in which a unit's weights are gathered."""
    one = torch.empty((), dtype=unit.dtype, device=unit.device)
    return {n: one.expand(shape) for n, shape in zip(unit.names, unit.shapes, strict=True)}


def _decode(codec: OneRound, out: Tensor, message: Parts, ctx: EncodeContext) -> None:
    """Writes a decoded message to `out`, in its type."""
    if isinstance(codec, Cast):
        out.copy_(message[0])
        return
    decoded = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    codec.decode_add(decoded.zero_(), [message], 1.0, ctx)
    if decoded is not out:
        out.copy_(decoded)
