"""The ends of all boundaries on one rank of a pipeline: shapes, links, and errors of neighbours."""

import json
from time import perf_counter, sleep
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.consistency import settings_collective
from gradwire.comm.meter import Meter
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import ConfigError
from gradwire.integrations import pipeline_private as private
from gradwire.integrations.pipeline_private import Stage
from gradwire.stages import message
from gradwire.stages.boundary import Channel, Receiver, Sender, StepInfo
from gradwire.stages.gravac import LinkSpeed
from gradwire.stages.message import HEADER_BYTES
from gradwire.stages.method import Direction, Form
from gradwire.stages.settings import StageSettings

NOTICE_S = 1.0
"""Time that neighbours of a rank that has failed get to read its error, before it may end."""
_UNFINISHED: list[tuple[dist.Work, Tensor]] = []
"""Messages to and from neighbours of a rank that has failed: no one waits for them any more, but
they must outlive the handle."""
_PROBE_BYTES = 1 << 18
"""The most bytes of a message that times a link."""


class Ends:
    """Senders and receivers of this rank, by stage and direction."""

    def __init__(
        self,
        stages: list[Stage],
        settings: StageSettings,
        step: StepInfo,
        meter: Meter,
        check_meter: Meter,
    ) -> None:
        self.senders: dict[tuple[int, Direction], Sender] = {}
        self.receivers: dict[tuple[int, Direction], Receiver] = {}
        self._stages, self._step, self._check_meter = stages, step, check_meter
        self._group = private.group_of(stages[0])
        self._device = torch.device(stages[0].device)
        # By this rank's stage and its neighbour.
        self._peers: dict[tuple[int, int], int] = {}
        for stage in stages:
            self._add(stage, settings, meter)

    def _add(self, stage: Stage, settings: StageSettings, meter: Meter) -> None:
        """Creates the ends of the boundaries before and after a stage."""
        index = stage.stage_index
        directions: tuple[tuple[int, Direction, Direction], ...] = (
            (index - 1, "gradients", "activations"),
            (index + 1, "activations", "gradients"),
        )
        for neighbour, sent, received in directions:
            peer, lower = private.peer_of(stage, neighbour), min(index, neighbour)
            if peer is None:
                continue
            self._peers[index, neighbour] = peer
            self.senders[index, sent] = Sender(Channel(settings.at(lower, sent), self._step, meter))
            self.receivers[index, received] = Receiver(
                Channel(settings.at(lower, received), self._step, meter)
            )

    def channels(self) -> list[Channel]:
        senders = [sender.channel for sender in self.senders.values()]
        return senders + [receiver.channel for receiver in self.receivers.values()]

    def named(self) -> dict[str, Channel]:
        """Returns the channels by name, as in saved states."""
        senders = {f"{i} sends {d}": end.channel for (i, d), end in self.senders.items()}
        receivers = {f"{i} receives {d}": end.channel for (i, d), end in self.receivers.items()}
        return senders | receivers

    def switch(self, settings: StageSettings) -> None:
        """Changes the methods; sample memories are kept."""
        for channel in self.channels():
            channel.settings = settings.at(channel.settings.lower, channel.settings.direction)
            channel.setting = channel.next_setting = 0
        self.senders = {key: Sender(sender.channel) for key, sender in self.senders.items()}

    def _peer(self, index: int, direction: Direction, *, sends: bool) -> int:
        """Returns the rank that a stage sends to, or receives from."""
        is_above = (direction == "activations") == sends
        return self._peers[index, index + 1 if is_above else index - 1]

    def compare_shapes(self, comm: ProcessGroupComm, device: torch.device) -> None:
        """Raises ConfigError on all ranks unless each stage expects what the one before sends."""
        own: dict[str, list[str]] = {}
        for channel in self.channels():
            channel.forms = {}
        for stage in self._stages:
            index = stage.stage_index
            if (index, "activations") in self.senders:
                forms = private.output_forms(stage)
                slots = sum(form.dtype.is_floating_point for form in forms)
                self.receivers[index, "gradients"].slots = slots
                own[f"{index} sends"] = _adopt(self.senders[index, "activations"].channel, forms)
            if (index, "activations") in self.receivers:
                forms = private.input_forms(stage)
                channel = self.receivers[index, "activations"].channel
                own[f"{index - 1} received"] = _adopt(channel, forms)
        found: dict[str, list[str]] = {}
        for text in comm.run(settings_collective(comm.size, device, {"shapes": own})):
            found |= json.loads(bytes(text.tolist()))["shapes"]
        for key in [key for key in found if key.endswith("sends")]:
            lower = int(key.split()[0])
            received = found.get(f"{lower} received")
            if received != found[key]:
                raise ConfigError(
                    f"stages {lower} and {lower + 1} disagree on shapes: {found[key]} are sent "
                    f"where {received} are expected; check input_args and output_args"
                )

    def notify(self, error: BaseException) -> None:
        """Sends an error to the neighbouring stages, which raise it, and takes what they send.

        They wait for messages of this rank, or for it to take theirs. They must have seen a
        message before: until then they wait for those of torch.
        """
        if not any(channel.forms for channel in self.channels()):
            return
        indices = " and ".join(str(stage.stage_index) for stage in self._stages)
        where = f"stage{'s' * (len(self._stages) > 1)} {indices}"
        for key in self.senders:
            notice = message.failure(error, self._step.number, where, self._device)
            work = dist.isend(notice, self._peer(*key, sends=True), self._group)
            _UNFINISHED.append((cast(dist.Work, work), notice))
        self._drain()
        # No wait for the notices: gloo has none with a limit that keeps the connection.
        sleep(NOTICE_S)

    def _drain(self) -> None:
        """Receives what neighbours still send in this step, so that they do not wait for it."""
        longest = max(channel.message_bytes_at_most() for channel in self.channels())
        for key, receiver in self.receivers.items():
            slots = max(len(receiver.channel.forms), receiver.slots)
            for _ in range(max(0, self._step.microbatches * slots - receiver.count)):
                buffer = message.room(longest, self._device)
                work = dist.irecv(buffer, self._peer(*key, sends=False), self._group)
                _UNFINISHED.append((cast(dist.Work, work), buffer))

    def measure_links(self) -> None:
        """Measures latency and rate to each neighbour, in the order of stages on all ranks."""
        keys = [(sender.channel.settings.lower, *key) for key, sender in self.senders.items()]
        for lower, index, direction in sorted(keys):
            peer = self._peer(index, direction, sends=True)
            sender, nbytes = self.senders[index, direction], self._probe_bytes(lower)
            if index == lower:
                speed = self.time_link(peer, nbytes)
                self._answer(peer, nbytes)
            else:
                self._answer(peer, nbytes)
                speed = self.time_link(peer, nbytes)
            if sender.search is not None:
                sender.search.link = speed

    def _probe_bytes(self, lower: int) -> int:
        """Returns the length of a message that times the link: that of the activations."""
        sender = self.senders.get((lower, "activations"))
        end = self.receivers[lower + 1, "activations"] if sender is None else sender
        dense = sum(form.nbytes for form in end.channel.forms.values())
        return min(max(dense, 8 * HEADER_BYTES), _PROBE_BYTES)

    def time_link(self, peer: int, nbytes: int) -> LinkSpeed:
        """Times an empty message and a long one; the first of all waits until the peer is there."""
        short = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        long = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        seconds = []
        for sent in (short, short, long):
            start_s = perf_counter()
            dist.send(sent, peer, self._group)
            dist.recv(torch.empty_like(short), peer, self._group)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(perf_counter() - start_s)
            self._check_meter.point_to_point(sent.numel(), short.numel())
        _, latency_s, long_s = seconds
        byte_s = max(0.0, long_s - latency_s) / (nbytes - HEADER_BYTES)
        return LinkSpeed(latency_s / 2, byte_s)

    def _answer(self, peer: int, nbytes: int) -> None:
        answer = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        for length in (HEADER_BYTES, HEADER_BYTES, nbytes):
            dist.recv(
                torch.empty(length, dtype=torch.uint8, device=self._device), peer, self._group
            )
            dist.send(answer, peer, self._group)
            self._check_meter.point_to_point(HEADER_BYTES, length)


def _adopt(channel: Channel, forms: list[Form]) -> list[str]:
    """Sets the forms of a channel; returns them as text."""
    channel.forms = dict(enumerate(forms))
    return [str(form) for form in forms]
