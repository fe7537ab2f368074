"""Pipeline stages: compressed activations, and compressed gradients of them, between stages."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_whole
from gradwire.comm.consistency import check_equal_settings, settings_collective
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import ConfigError, GradwireError, PeerError
from gradwire.identity import code_digests, identity_of
from gradwire.integrations import pipeline_private as private
from gradwire.integrations.pipeline_private import Schedule, Stage
from gradwire.stages import message
from gradwire.stages.boundary import (
    Channel,
    Receiver,
    Sender,
    Settings,
    StepInfo,
)
from gradwire.stages.gravac import LinkSpeed, StageGraVAC, controller_of
from gradwire.stages.message import HEADER_BYTES
from gradwire.stages.method import DIRECTIONS, Direction, Form, stage_method
from gradwire.stages.samples import MicroBatches, SampleMemory, memory_of, read_ids
from gradwire.version import VERSION

NOTICE_S = 1.0
"""Time that neighbours of a rank that has failed get to read its error, before it may end."""
_UNFINISHED: list[tuple[dist.Work, Tensor]] = []
"""Messages to and from neighbours of a rank that has failed: no one waits for them any more, but
they must outlive the handle."""
_PROBE_BYTES = 1 << 18


class Stages:
    """Handle of a pipeline whose messages between stages are compressed, until `detach`."""

    def __init__(
        self,
        stages: list[Stage],
        schedule: Schedule | None,
        methods: Mapping[Direction, Compressor | str],
        memory: SampleMemory | None,
        controller: StageGraVAC | None,
        seed: int,
    ) -> None:
        self._stages, self._schedule = stages, schedule
        group = private.group_of(stages[0])
        self._device = torch.device(stages[0].device)
        self._comm = ProcessGroupComm(group)
        # For checks between ranks, whose bytes are not those of the messages.
        self._check_comm = ProcessGroupComm(group, Meter())
        self._memory, self._controller, self._seed = memory, controller, seed
        self._step = StepInfo()
        self._samples: list[int] | None = None
        self._failed: str | None = None
        self._running = self._preparing = False
        self._batch: tuple[bool, dict[str, Form]] | None = None
        self._began_s: float | None = None
        self._step_s = 0.0
        self._at_begin, self._dense_at_begin = Meter(), 0
        self._methods = dict(methods)
        check_equal_settings(self._check_comm, self._device, self._identity(methods))
        self._senders: dict[tuple[int, Direction], Sender] = {}
        self._receivers: dict[tuple[int, Direction], Receiver] = {}
        # By this rank's stage and its neighbour.
        self._peers: dict[tuple[int, int], int] = {}
        for stage in stages:
            self._add_ends(stage)
        self._undo = [private.install(stage, self) for stage in stages]
        if schedule is not None:
            self._undo.append(private.guard_step(schedule, self._guarded))

    def _identity(self, methods: Mapping[Direction, Compressor | str]) -> dict[str, object]:
        """Returns what must be equal on all ranks; the methods are checked while at it."""
        found: dict[str, object] = {"version": VERSION, "seed": self._seed}
        for direction in DIRECTIONS:
            ladder = self._settings(0, direction, methods[direction]).methods
            found[direction] = [identity_of(method) for method in ladder]
            found[f"{direction} code"] = {k: v for m in ladder for k, v in code_digests(m).items()}
        return {
            **found,
            "memory": None if self._memory is None else identity_of(self._memory),
            "controller": None if self._controller is None else identity_of(self._controller),
            "stages": self._stages[0].num_stages,
        }

    def _settings(self, lower: int, direction: Direction, given: Compressor | str) -> Settings:
        method = stage_method(direction, given)
        memory = self._memory if direction == "activations" else None
        controller = self._controller
        ladder = (method,) if controller is None else controller.settings(direction, method)
        for each in ladder if memory is not None else ():
            traits = each.traits()
            if not traits.contraction:
                raise ConfigError(
                    f"attach_pipeline: memory='samples' needs a contraction, since both ends add "
                    f"up what is sent: {traits.why_not or f'{type(each).__name__} is none'}"
                )
        return Settings(lower, direction, ladder, memory, controller, self._seed)

    def _add_ends(self, stage: Stage) -> None:
        """Creates the ends of the boundaries before and after a stage."""
        index = stage.stage_index
        for neighbour, sends, receives in (
            (index - 1, "gradients", "activations"),
            (index + 1, "activations", "gradients"),
        ):
            peer, lower = private.peer_of(stage, neighbour), min(index, neighbour)
            if peer is None:
                continue
            sent, received = cast(Direction, sends), cast(Direction, receives)
            self._peers[index, neighbour] = peer
            self._senders[index, sent] = Sender(self._channel(lower, sent))
            self._receivers[index, received] = Receiver(self._channel(lower, received))

    def _peer(self, index: int, direction: Direction, *, sends: bool) -> int:
        """Returns the rank that a stage sends to, or receives from."""
        is_above = (direction == "activations") == sends
        return self._peers[index, index + 1 if is_above else index - 1]

    def _channel(self, lower: int, direction: Direction) -> Channel:
        settings = self._settings(lower, direction, self._methods[direction])
        return Channel(settings, self._step, self._comm.meter)

    def _channels(self) -> list[Channel]:
        ends = [*self._senders.values(), *self._receivers.values()]
        return [end.channel for end in ends]

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
        for sender in self._senders.values():
            sender.begin_step(previous_s if step.number > 2 else None)
        for receiver in self._receivers.values():
            receiver.begin_step()
        window = 0 if self._controller is None else self._controller.window
        if window and step.trains and step.number > 1 and (step.number - 2) % window == 0:
            self._measure_links()

    def shapes_known(self, stage: Stage) -> None:
        """Compares shapes with all ranks, when torch has prepared the last stage of this one."""
        self._preparing = True
        if stage is not self._stages[-1]:
            return
        own: dict[str, list[str]] = {}
        for each in self._stages:
            index = each.stage_index
            if (index, "activations") in self._senders:
                forms = private.output_forms(each)
                own[f"{index} sends"] = [str(form) for form in forms]
                channel = self._senders[index, "activations"].channel
                channel.forms = dict(enumerate(forms))
            if (index, "activations") in self._receivers:
                forms = private.input_forms(each)
                own[f"{index - 1} received"] = [str(form) for form in forms]
                channel = self._receivers[index, "activations"].channel
                channel.forms = dict(enumerate(forms))
        found: dict[str, list[str]] = {}
        request = settings_collective(self._comm.size, self._device, {"shapes": own})
        for text in self._check_comm.run(request):
            found |= json.loads(bytes(text.tolist()))["shapes"]
        for key in [key for key in found if key.endswith("sends")]:
            lower = key.split()[0]
            received = found.get(f"{lower} received")
            if received != found[key]:
                raise ConfigError(
                    f"stages {lower} and {int(lower) + 1} disagree on shapes: {found[key]} are "
                    f"sent where {received} are expected; check input_args and output_args"
                )

    def send(
        self, stage: int, direction: Direction, microbatch: int, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Returns the messages of tensors that a stage sends."""
        if not tensors:
            return []
        self._preparing = False
        sender = self._senders[stage, direction]
        with _Reported(self):
            return [sender.encode(microbatch, slot, x) for slot, x in enumerate(tensors)]

    def post(
        self, stage: int, direction: Direction, microbatch: int, targets: list[Tensor]
    ) -> list[Tensor]:
        """Returns buffers for the messages about tensors that a stage is to receive."""
        if not targets:
            return []
        self._preparing = False
        receiver = self._receivers[stage, direction]
        with _Reported(self):
            return [receiver.post(microbatch, slot, t) for slot, t in enumerate(targets)]

    def fill(self, stage: int, direction: Direction, microbatch: int) -> None:
        """Decodes what has arrived for a micro-batch."""
        receiver = self._receivers.get((stage, direction))
        if receiver is not None:
            with _Reported(self):
                receiver.fill(microbatch)

    def _guarded(self, step: Callable[[], Any], batch: dict[str, Form], *, trains: bool) -> Any:
        """Runs a step of the schedule; on an error all other ranks are informed."""
        self._check_usable()
        self._running, start_s = True, perf_counter()
        for receiver in self._receivers.values():
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

        They wait for messages of this rank, or for it to take theirs. What was begun in this step
        cannot be continued, so the handle is of no use afterwards.
        """
        if self._failed is not None:
            return
        self._failed = str(error)
        if self._preparing or not any(channel.forms for channel in self._channels()):
            # Neighbours wait for messages of torch itself, which are shorter than ours.
            return
        group = private.group_of(self._stages[0])
        notices = []
        for key in self._senders:
            notice = message.failure(error, self._step.number, self._where(), self._device)
            work = dist.isend(notice, self._peer(*key, sends=True), group)
            notices.append((cast(dist.Work, work), notice))
        _UNFINISHED.extend([*notices, *self._drained(group)])
        # No wait for the notices: gloo has none with a limit that keeps the connection.
        sleep(NOTICE_S)

    def _where(self) -> str:
        """Returns the stages of this rank in words."""
        indices = [str(stage.stage_index) for stage in self._stages]
        return f"{'stage' if len(indices) == 1 else 'stages'} {' and '.join(indices)}"

    def _drained(self, group: dist.ProcessGroup) -> list[tuple[dist.Work, Tensor]]:
        """Receives what neighbours still send in this step, so that they do not wait for it."""
        longest = max(
            (channel.message_bytes_at_most() for channel in self._channels()), default=HEADER_BYTES
        )
        works = []
        for key, receiver in self._receivers.items():
            missing = self._step.microbatches * len(receiver.channel.forms) - receiver.count
            for _ in range(max(0, missing)):
                buffer = message.room(longest, self._device)
                work = dist.irecv(buffer, self._peer(*key, sends=False), group)
                works.append((cast(dist.Work, work), buffer))
        return works

    def _measure_links(self) -> None:
        """Measures latency and rate to each neighbour, in the order of stages on all ranks."""
        group = private.group_of(self._stages[0])
        keys = {
            (sender.channel.settings.lower, index, direction)
            for (index, direction), sender in self._senders.items()
        }
        for lower, index, direction in sorted(keys):
            peer = self._peer(index, direction, sends=True)
            sender = self._senders[index, direction]
            nbytes = self._probe_bytes(lower)
            if index == lower:
                speed = self._time_link(peer, nbytes, group)
                self._answer(peer, nbytes, group)
            else:
                self._answer(peer, nbytes, group)
                speed = self._time_link(peer, nbytes, group)
            if sender.search is not None:
                sender.search.link = speed

    def _probe_bytes(self, lower: int) -> int:
        """Returns the length of a message that times the link: that of the activations."""
        sender = self._senders.get((lower, "activations"))
        end = self._receivers[lower + 1, "activations"] if sender is None else sender
        dense = sum(form.nbytes for form in end.channel.forms.values())
        return min(max(dense, 8 * HEADER_BYTES), _PROBE_BYTES)

    def _time_link(self, peer: int, nbytes: int, group: dist.ProcessGroup) -> LinkSpeed:
        """Times an empty message and a long one; the first of all waits until the peer is there."""
        short = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        long = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        seconds = []
        for sent in (short, short, long):
            start_s = perf_counter()
            dist.send(sent, peer, group)
            dist.recv(torch.empty_like(short), peer, group)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(perf_counter() - start_s)
            self._check_comm.meter.point_to_point(sent.numel(), short.numel())
        _, latency_s, long_s = seconds
        byte_s = max(0.0, long_s - latency_s) / (nbytes - HEADER_BYTES)
        return LinkSpeed(latency_s / 2, byte_s)

    def _answer(self, peer: int, nbytes: int, group: dist.ProcessGroup) -> None:
        for length in (HEADER_BYTES, HEADER_BYTES, nbytes):
            dist.recv(torch.empty(length, dtype=torch.uint8, device=self._device), peer, group)
            answer = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            dist.send(answer, peer, group)
            self._check_comm.meter.point_to_point(HEADER_BYTES, length)

    # What users call.

    def samples(self, ids: Sequence[int] | Tensor) -> None:
        """Names the samples of the next training step, one number per row of the whole batch.

        Called on all ranks, with equal numbers, before every training step if
        `memory="samples"`. Evaluation needs none: it is sent as it is, and changes nothing.
        """
        self._check_between_steps("samples")
        refused, found = None, list[int]()
        try:
            if self._memory is None:
                raise ConfigError("samples: needs attach_pipeline(..., memory='samples')")
            found = read_ids(ids)
            self._check_room(found, self._memory.max_bytes)
        except ConfigError as error:
            refused = error
        digest = MicroBatches(found, 1).digests[0]
        self._check_on_all_ranks({"samples": len(found), "their checksum": digest}, refused)
        self._samples = found

    def _check_room(self, ids: list[int], limit: int) -> None:
        for channel in self._channels():
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
        given = {"activations": activations, "gradients": gradients}
        methods = {d: self._methods[d] if given[d] is None else given[d] for d in DIRECTIONS}
        chosen = cast("dict[Direction, Compressor | str]", methods)
        refused, settings = None, dict[str, object]()
        try:
            settings = self._identity(chosen)
        except ConfigError as error:
            refused = error
        self._check_on_all_ranks(settings, refused)
        self._methods = chosen
        for channel in self._channels():
            old = channel.settings
            channel.settings = self._settings(old.lower, old.direction, chosen[old.direction])
            channel.setting = channel.next_setting = 0
        self._senders = {key: Sender(sender.channel) for key, sender in self._senders.items()}

    def stats(self) -> dict[str, object]:
        """Returns bytes and times of this rank since attach, and those of each boundary.

        `dense_bytes` are those that plain pipelining sends. Times are of encoding and decoding;
        torch waits for messages, so that time is part of the step. `auxiliary_bytes` are those of
        checks and of timed links, which no other number includes.
        """
        meter, dense = self._comm.meter, self._dense_bytes()
        ends = {("sends", *key): sender.channel for key, sender in self._senders.items()}
        ends |= {("receives", *key): each.channel for key, each in self._receivers.items()}
        return {
            "steps": self._step.number,
            "messages": sum(end.channel.counts.messages for end in self._senders.values()),
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
        search = self._senders[index, direction].search if verb == "sends" else None
        return {} if search is None else {"controller": search.state()}

    def _dense_bytes(self) -> int:
        return sum(sender.channel.counts.dense_bytes for sender in self._senders.values())

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
        errors = [s.channel.counts.relative_error for s in self._senders.values()]
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
        ends = {f"{i} sends {d}": s.channel.state() for (i, d), s in self._senders.items()}
        ends |= {f"{i} receives {d}": r.channel.state() for (i, d), r in self._receivers.items()}
        searches = {
            f"{i} sends {d}": s.search.state()
            for (i, d), s in self._senders.items()
            if s.search is not None
        }
        identity = json.dumps(self._identity(self._methods), sort_keys=True)
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
        self._check_on_all_ranks({"steps": steps}, refused)
        self._step.number = steps
        for (i, d), sender in self._senders.items():
            sender.channel.load(own["ends"][f"{i} sends {d}"])
            if sender.search is not None:
                sender.search.load(own["searches"][f"{i} sends {d}"])
        for (i, d), receiver in self._receivers.items():
            receiver.channel.load(own["ends"][f"{i} receives {d}"])

    def _own_part(self, state: Mapping[str, object]) -> dict[str, Any]:
        """Returns the state of this rank; raises ConfigError unless it is one of this pipeline."""
        own = state.get(self._key()) if isinstance(state, Mapping) else None
        if not isinstance(own, dict) or not {"steps", "ends", "searches", "identity"} <= own.keys():
            raise ConfigError(f"load_state_dict: no state of a pipeline for {self._key()}")
        identity = json.dumps(self._identity(self._methods), sort_keys=True)
        if own["identity"] != identity:
            raise ConfigError(
                f"load_state_dict: the state was saved with {own['identity']}, attached is "
                f"{identity}"
            )
        check_whole("load_state_dict", "steps", own["steps"], 0)
        ends = {f"{i} sends {d}" for i, d in self._senders}
        ends |= {f"{i} receives {d}" for i, d in self._receivers}
        if set(own["ends"]) != ends:
            raise ConfigError(
                f"load_state_dict: the state has the ends {sorted(own['ends'])}, this rank has "
                f"{sorted(ends)}"
            )
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
        if self._running or any(receiver.posted for receiver in self._receivers.values()):
            raise ConfigError(f"{name}: a step is under way; call it between two steps")

    def _check_on_all_ranks(
        self, settings: Mapping[str, object], refused: ConfigError | None
    ) -> None:
        """Raises ConfigError on all ranks if any of them refuses, or has other settings."""
        outcome = {"refused": str(refused)} if refused else settings
        try:
            check_equal_settings(self._check_comm, self._device, outcome)
        except ConfigError as error:
            raise refused or error from None
        if refused:
            raise refused

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
    methods: dict[Direction, Compressor | str] = {
        "activations": activations,
        "gradients": gradients,
    }
    return Stages(stages, schedule, methods, kept, chosen, seed)
