"""Pipeline stages: compressed activations, and compressed gradients of them, between stages."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_whole
from gradwire.comm.consistency import check_equal_settings, check_on_all_ranks
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import ConfigError, GradwireError, PeerError
from gradwire.integrations import pipeline_private as private
from gradwire.integrations.pipeline_ends import Ends
from gradwire.integrations.pipeline_private import Schedule, Stage
from gradwire.stages.boundary import StepInfo
from gradwire.stages.gravac import StageGraVAC, controller_of
from gradwire.stages.method import Direction, Form, stage_method
from gradwire.stages.samples import MicroBatches, SampleMemory, memory_of, read_ids
from gradwire.stages.settings import StageSettings

log = logging.getLogger("gradwire")


class Stages:
    """Handle of a pipeline whose messages between stages are compressed, until `detach`."""

    def __init__(
        self,
        stages: list[Stage],
        schedule: Schedule | None,
        settings: StageSettings,
    ) -> None:
        self._stages, self._schedule = stages, schedule
        group = private.group_of(stages[0])
        self._device = torch.device(stages[0].device)
        self._comm = ProcessGroupComm(group)
        # For checks between ranks, whose bytes are not those of the messages.
        self._check_comm = ProcessGroupComm(group, Meter())
        self._settings, self._step = settings, StepInfo()
        self._samples: list[int] | None = None
        self._failed: str | None = None
        self._running = self._preparing = False
        self._batch: tuple[bool, dict[str, Form]] | None = None
        self._began_s: float | None = None
        self._step_s = 0.0
        self._at_begin, self._dense_at_begin = Meter(), 0
        check_equal_settings(self._check_comm, self._device, self._identity(settings))
        self._ends = Ends(stages, settings, self._step, self._comm.meter, self._check_comm.meter)
        self._undo = [private.install(stage, self) for stage in stages]
        if schedule is not None:
            self._undo.append(private.guard_step(schedule, self._guarded))

    def _identity(self, settings: StageSettings) -> dict[str, object]:
        """Returns what must be equal on all ranks."""
        return {**settings.identity(), "stages": self._stages[0].num_stages}

    # What torch calls, by way of `pipeline_private`.

    def begin_step(self, stage: Stage) -> None:
        """Begins a step when torch clears the first stage of this rank."""
        if stage is not self._stages[0]:
            return
        self._check_usable()
        now_s = perf_counter()
        previous_s = None if self._began_s is None else now_s - self._began_s
        self._began_s = now_s
        self._at_begin = replace(self._comm.meter)
        self._dense_at_begin = self._dense_bytes()
        step = self._step
        step.number += 1
        step.trains = bool(stage.has_backward)
        step.microbatches = private.microbatches_of(stage, self._schedule)
        if step.trains:
            ids, self._samples = self._samples, None
            step.samples = None if ids is None else MicroBatches(ids, step.microbatches)
        else:
            step.samples = None
        for sender in self._ends.senders.values():
            sender.begin_step(previous_s if step.number > 2 else None)
        for receiver in self._ends.receivers.values():
            receiver.begin_step()
        controller = self._settings.controller
        window = 0 if controller is None else controller.window
        if window and step.trains and step.number > 1 and (step.number - 2) % window == 0:
            self._ends.measure_links()

    def shapes_known(self, stage: Stage) -> None:
        """Compares shapes with all ranks, when torch has prepared the last stage of this one."""
        self._preparing = True
        if stage is self._stages[-1]:
            self._ends.compare_shapes(self._check_comm, self._device)

    def send(
        self, stage: int, direction: Direction, microbatch: int, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Returns the messages of tensors that a stage sends."""
        if not tensors:
            return []
        self._preparing = False
        sender = self._ends.senders[stage, direction]
        with _Reported(self):
            return [sender.encode(microbatch, slot, x) for slot, x in enumerate(tensors)]

    def post(
        self, stage: int, direction: Direction, microbatch: int, targets: list[Tensor]
    ) -> list[Tensor]:
        """Returns buffers for the messages about tensors that a stage is to receive."""
        if not targets:
            return []
        self._preparing = False
        receiver = self._ends.receivers[stage, direction]
        with _Reported(self):
            return [receiver.post(microbatch, slot, t) for slot, t in enumerate(targets)]

    def fill(self, stage: int, direction: Direction, microbatch: int) -> None:
        """Decodes what has arrived for a micro-batch."""
        receiver = self._ends.receivers.get((stage, direction))
        if receiver is not None:
            with _Reported(self):
                receiver.fill(microbatch)

    def _guarded(self, step: Callable[[], Any], batch: dict[str, Form], *, trains: bool) -> Any:
        """Runs a step of the schedule; on an error all other ranks are informed."""
        self._check_usable()
        self._running, start_s = True, perf_counter()
        for receiver in self._ends.receivers.values():
            receiver.count = 0
        try:
            self._check_batch(batch, trains)
            result = step()
            self._step_s = perf_counter() - start_s
            return result
        except Exception as error:
            # Torch wraps what a stage raises, and ours has the reason.
            self.fail(error)
            if private.is_lost_peer(error) and not isinstance(error, GradwireError):
                first = str(error).strip().partition("\n")[0]
                raise PeerError(
                    f"pipeline: rank {self._comm.rank} has lost a neighbour in step "
                    f"{self._step.number}: {first}"
                ) from error
            raise
        finally:
            self._running = False

    def _check_batch(self, batch: dict[str, Form], trains: bool) -> None:
        """Raises ConfigError if a batch differs from the one before: torch prepares for one form.

        It prepares again when training and evaluation alternate.
        """
        before, self._batch = self._batch, (trains, batch)
        if before is None or before[0] != trains or before[1] == batch:
            return
        changes = [
            f"{name} from {before[1].get(name, 'none')} to {batch.get(name, 'none')}"
            for name in {**before[1], **batch}
            if before[1].get(name) != batch.get(name)
        ]
        raise ConfigError(
            f"pipeline: the batch has changed: {', '.join(changes)}; all steps must have the "
            "shapes of the first one (drop or pad the last batch)"
        )

    def fail(self, error: BaseException) -> None:
        """Sends an error to the neighbouring stages, which raise it, and takes what they send.

        What was begun in this step cannot be continued, so the handle is of no use afterwards.
        """
        if self._failed is not None:
            return
        self._failed = str(error)
        # While torch prepares, neighbours wait for messages of its own, which are shorter.
        if self._preparing:
            return
        try:
            self._ends.notify(error)
        except (RuntimeError, ValueError) as unsent:
            # The connection is lost too; the error itself is what matters.
            log.warning("the other ranks could not be informed: %s", unsent)

    # What users call.

    def samples(self, ids: Sequence[int] | Tensor) -> None:
        """Names the samples of the next training step, one number per row of the whole batch.

        Called on all ranks, with equal numbers, before every training step if
        `memory="samples"`. Evaluation needs none: it is sent as it is, and changes nothing.
        """
        self._check_between_steps("samples")
        refused, found = None, list[int]()
        try:
            if self._settings.memory is None:
                raise ConfigError("samples: needs attach_pipeline(..., memory='samples')")
            found = read_ids(ids)
            self._check_room(found, self._settings.memory.max_bytes)
        except ConfigError as error:
            refused = error
        digest = MicroBatches(found, 1).digests[0]
        check_on_all_ranks(
            self._check_comm,
            self._device,
            {"samples": len(found), "their checksum": digest},
            refused,
        )
        self._samples = found

    def _check_room(self, ids: list[int], limit: int) -> None:
        for channel in self._ends.channels():
            nbytes = 0 if channel.kept is None else channel.kept.nbytes_with(ids)
            if nbytes > limit:
                raise ConfigError(
                    f"samples: {channel.settings.name} would keep {nbytes} bytes at each end, more "
                    f"than max_bytes={limit}; memory='samples' is for small sets of samples that "
                    "are seen several times"
                )

    def switch(
        self,
        activations: Compressor | str | None = None,
        gradients: Compressor | str | None = None,
    ) -> None:
        """Changes methods between two steps; called on all ranks. None leaves a direction as it is.

        A sample memory is kept: it does not depend on the method.
        """
        self._check_between_steps("switch")
        refused, settings = None, self._settings
        try:
            settings = settings.with_methods(activations, gradients)
        except ConfigError as error:
            refused = error
        check_on_all_ranks(self._check_comm, self._device, self._identity(settings), refused)
        self._settings = settings
        self._ends.switch(settings)

    def stats(self) -> dict[str, object]:
        """Returns bytes and times of this rank since attach, and those of each boundary.

        `dense_bytes` are those that plain pipelining sends. Times are of encoding and decoding;
        torch waits for messages, so that time is part of the step. `auxiliary_bytes` are those of
        checks and of timed links, which no other number includes.
        """
        meter, dense = self._comm.meter, self._dense_bytes()
        ends = {("sends", *key): sender.channel for key, sender in self._ends.senders.items()}
        ends |= {("receives", *key): each.channel for key, each in self._ends.receivers.items()}
        return {
            "steps": self._step.number,
            "messages": sum(end.channel.counts.messages for end in self._ends.senders.values()),
            "sent_bytes": meter.sent_bytes,
            "received_bytes": meter.received_bytes,
            "dense_bytes": dense,
            "ratio": dense / meter.sent_bytes if meter.sent_bytes else 1.0,
            "encode_s": meter.encode_s,
            "decode_s": meter.decode_s,
            "boundaries": {
                f"stage {index} {verb} {direction}": {
                    **channel.explain(),
                    **self._explain_search(index, direction, verb),
                }
                for (verb, index, direction), channel in sorted(ends.items(), key=str)
            },
            "auxiliary_bytes": self._check_comm.meter.sent_bytes,
        }

    def _explain_search(self, index: int, direction: Direction, verb: str) -> dict[str, object]:
        search = self._ends.senders[index, direction].search if verb == "sends" else None
        return {} if search is None else {"controller": search.state()}

    def _dense_bytes(self) -> int:
        return sum(sender.channel.counts.dense_bytes for sender in self._ends.senders.values())

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of this rank's last complete step, for experiment loggers.

        A step is complete when the next one begins, or between steps of a schedule. Empty before.
        """
        if not isinstance(prefix, str):
            raise ConfigError(f"metrics: prefix must be a string, got {prefix!r}")
        if not self._step.number or self._running:
            return {}
        step, dense = self._comm.meter.since(self._at_begin), self._dense_bytes()
        dense -= self._dense_at_begin
        errors = [s.channel.counts.relative_error for s in self._ends.senders.values()]
        known = [error for error in errors if error is not None]
        found = {
            "step": self._step.number,
            "sent_bytes": step.sent_bytes,
            "received_bytes": step.received_bytes,
            "dense_bytes": dense,
            "ratio": dense / step.sent_bytes if step.sent_bytes else 1.0,
            "calls": step.calls,
            "encode_s": step.encode_s,
            "decode_s": step.decode_s,
            **({"step_s": self._step_s} if self._step_s else {}),
            **({"relative_error": sum(known) / len(known)} if known else {}),
        }
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def state_dict(self) -> dict[str, object]:
        """Returns step, settings and sample memory of this rank, as tensors and numbers.

        The key names the rank, so that ranks do not overwrite each other.
        """
        self._check_between_steps("state_dict")
        ends = {name: channel.state() for name, channel in self._ends.named().items()}
        searches = {
            f"{i} sends {d}": s.search.state()
            for (i, d), s in self._ends.senders.items()
            if s.search is not None
        }
        identity = json.dumps(self._identity(self._settings), sort_keys=True)
        state = {"steps": self._step.number, "ends": ends, "searches": searches}
        return {self._key(): {**state, "identity": identity}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues where this rank was saved; called on all ranks, each with its own state.

        If a rank refuses its state, all ranks do, and nothing changes.
        """
        self._check_between_steps("load_state_dict")
        refused, steps, own = None, -1, dict[str, Any]()
        try:
            own = self._own_part(state)
            steps = own["steps"]
        except ConfigError as error:
            refused = error
        check_on_all_ranks(self._check_comm, self._device, {"steps": steps}, refused)
        self._step.number = steps
        for name, channel in self._ends.named().items():
            channel.load(own["ends"][name])
        for (i, d), sender in self._ends.senders.items():
            if sender.search is not None:
                sender.search.load(own["searches"][f"{i} sends {d}"])

    def _own_part(self, state: Mapping[str, object]) -> dict[str, Any]:
        """Returns the state of this rank; raises ConfigError unless it is one of this pipeline."""
        own = state.get(self._key()) if isinstance(state, Mapping) else None
        if not isinstance(own, dict) or not {"steps", "ends", "searches", "identity"} <= own.keys():
            raise ConfigError(f"load_state_dict: no state of a pipeline for {self._key()}")
        identity = json.dumps(self._identity(self._settings), sort_keys=True)
        if own["identity"] != identity:
            raise ConfigError(
                f"load_state_dict: the state was saved with {own['identity']}, attached is "
                f"{identity}"
            )
        check_whole("load_state_dict", "steps", own["steps"], 0)
        ends = set(self._ends.named())
        if set(own["ends"]) != ends:
            raise ConfigError(
                f"load_state_dict: the state has the ends {sorted(own['ends'])}, this rank has "
                f"{sorted(ends)}"
            )
        for name, channel in self._ends.named().items():
            for key in ("setting", "next_setting"):
                most = len(channel.settings.methods) - 1
                check_whole("load_state_dict", f"{name}: {key}", own["ends"][name][key], 0, most)
        return own

    def detach(self) -> None:
        """Returns to plain messages; called on all ranks. A sample memory is dropped."""
        if not self._undo:
            raise ConfigError("these stages are detached; attach the schedule again")
        if self._running:
            raise ConfigError("detach: a step is under way; call it between two steps")
        for undo in self._undo:
            undo()
        self._undo = []

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise PeerError(
                f"pipeline: an earlier step has failed, start the job again: {self._failed}"
            )

    def _check_between_steps(self, name: str) -> None:
        if not self._undo:
            raise ConfigError("these stages are detached; attach the schedule again")
        self._check_usable()
        if self._running or any(receiver.posted for receiver in self._ends.receivers.values()):
            raise ConfigError(f"{name}: a step is under way; call it between two steps")

    def _key(self) -> str:
        return f"rank{self._comm.rank}"


class _Reported:
    """Sends an error of a message to the other ranks before it is raised on this one."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._stages.fail(error)


def attach_pipeline(
    stage_or_schedule: object,
    activations: Compressor | str = "int8",
    gradients: Compressor | str = "int8",
    *,
    memory: SampleMemory | str | None = None,
    controller: StageGraVAC | str | None = None,
    seed: int = 0,
) -> Stages:
    """Compresses what stages of `torch.distributed.pipelining` send each other.

    `stage_or_schedule` is a schedule, or the PipelineStage (or list of them) of this rank; with a
    schedule an error on one rank is raised on all. `activations` and `gradients` are methods with
    one message of known length: quantisers, casts, and sparsifiers with a fixed number of entries.
    `memory="samples"` sends differences to the last activations of the same samples
    (`SampleMemory`), and needs a schedule. `controller="gravac"` chooses among none, int8, int4
    and the given methods for each boundary (`StageGraVAC`). Called on all ranks of the pipeline,
    with equal settings, after the schedule was made and before or between its steps.
    """
    private.check_version()
    stages, schedule = private.find_stages(stage_or_schedule)
    check_whole("attach_pipeline", "seed", seed, 0)
    kept, chosen = memory_of(memory), controller_of(controller)
    if kept is not None and schedule is None:
        raise ConfigError(
            "attach_pipeline: memory='samples' needs the schedule, which knows the micro-batches; "
            "give it in place of the stage"
        )
    settings = StageSettings(
        stage_method("activations", activations),
        stage_method("gradients", gradients),
        kept,
        chosen,
        seed,
    )
    return Stages(stages, schedule, settings)
