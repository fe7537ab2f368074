"""The two ends of a boundary between stages, in one direction: encoding, validation, accounting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError, PeerError, WireError
from gradwire.spec import format_spec
from gradwire.stages import message
from gradwire.stages.gravac import Search, StageGraVAC
from gradwire.stages.message import HEADER_BYTES, LEAST_BYTES, Header
from gradwire.stages.method import (
    Direction,
    Form,
    body_bytes,
    decode,
    encode,
    from_raw,
    raw,
    sends_raw,
)
from gradwire.stages.samples import KeptSamples, MicroBatches, SampleMemory
from gradwire.types import EncodeContext

SAMPLE_EVERY = 100
"""Steps between measurements of the relative error, unless a controller wants more."""
_MICROBATCHES = 1 << 20


@dataclass
class StepInfo:
    """The step under way, which all ends of a rank share."""

    number: int = 0
    trains: bool = True
    microbatches: int = 0
    samples: MicroBatches | None = None


@dataclass
class Counts:
    """Messages and bytes that an end has sent, or received, since the handle was attached."""

    messages: int = 0
    nbytes: int = 0
    dense_bytes: int = 0
    """Bytes that plain pipelining takes for these tensors."""
    relative_error: float | None = None


class Settings(NamedTuple):
    """The settings of a boundary in one direction, which both of its ends know beforehand."""

    lower: int
    """The index of the earlier of the two stages."""
    direction: Direction
    methods: tuple[OneRound, ...]
    memory: SampleMemory | None
    controller: StageGraVAC | None
    seed: int

    @property
    def name(self) -> str:
        return f"stages {self.lower} and {self.lower + 1}, {self.direction}"


@dataclass
class Channel:
    """One end: its settings, the forms of its tensors, and what it remembers."""

    settings: Settings
    step: StepInfo
    meter: Meter
    setting: int = 0
    next_setting: int = 0
    forms: dict[int, Form] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    kept: KeptSamples | None = None

    def __post_init__(self) -> None:
        if self.settings.memory is not None:
            self.kept = KeptSamples(self.settings.memory)

    @property
    def method(self) -> OneRound:
        return self.settings.methods[self.setting]

    def begin_step(self) -> None:
        self.setting = self.next_setting
        if self.kept is not None and self.step.trains:
            if self.step.samples is None:
                raise ConfigError(
                    f"{self.settings.name}: memory='samples' needs the numbers of the samples; "
                    "call samples(ids) on all ranks before every training step"
                )
            self.kept.begin_step(self.step.samples)

    def is_raw(self, microbatch: int, form: Form) -> bool:
        """Returns whether a tensor is sent as it lies in memory; both ends decide alike."""
        return sends_raw(self.method, form) or not self.is_known(microbatch)

    def is_known(self, microbatch: int) -> bool:
        """Returns whether both ends know all samples of a micro-batch, or need not know them."""
        return self.kept is None or (self.step.trains and not self.kept.is_new(microbatch))

    def message_bytes(self, microbatch: int, form: Form) -> int:
        is_raw = self.is_raw(microbatch, form)
        nbytes = form.nbytes if is_raw else body_bytes(self.method, form)
        return max(LEAST_BYTES, HEADER_BYTES + nbytes)

    def message_bytes_at_most(self) -> int:
        """Returns a length that no message of this end exceeds."""
        methods, forms = self.settings.methods, self.forms.values()
        lengths = [max(form.nbytes, body_bytes(m, form)) for form in forms for m in methods]
        return max(LEAST_BYTES, HEADER_BYTES + max(lengths, default=0))

    def header(self, microbatch: int, form: Form, nbytes: int) -> Header:
        kind = message.RAW if self.is_raw(microbatch, form) else message.ENCODED
        samples = self.step.samples
        digest = 0 if self.kept is None or samples is None else samples.digests[microbatch]
        place = self.step.number, microbatch, nbytes, digest
        return message.wrapped(Header(kind, self.setting, self.next_setting, *place))

    def context(self, microbatch: int, slot: int, form: Form) -> EncodeContext:
        lane = crc32(f"{self.settings.name}, {slot}".encode())
        step = self.step.number * _MICROBATCHES + microbatch
        return EncodeContext(form.shape, seed=self.settings.seed, lane_id=lane, step=step)

    def check_form(self, slot: int, form: Form) -> None:
        """Raises ConfigError if the tensor differs from that of the first step."""
        agreed = self.forms.setdefault(slot, form)
        if form != agreed:
            raise ConfigError(
                f"{self.settings.name}: tensor {slot} has changed from {agreed} to {form}; all "
                "steps must have the shapes of the first one (drop or pad the last batch)"
            )

    def base(self, microbatch: int, slot: int, form: Form) -> Tensor | None:
        """Returns what both ends know of the samples, or None without a memory."""
        if self.kept is None:
            return None
        assert self.step.samples is not None
        return self.kept.rows(slot, self.step.samples[microbatch], form.shape)

    def keep(self, microbatch: int, slot: int, values: Tensor) -> Tensor:
        """Keeps the activations that the next stage uses, if this is a training step."""
        if self.kept is None or not self.step.trains or not values.dtype.is_floating_point:
            return values
        assert self.step.samples is not None
        return self.kept.keep(slot, self.step.samples[microbatch], values)

    def state(self) -> dict[str, object]:
        return {
            "setting": self.setting,
            "next_setting": self.next_setting,
            "samples": {} if self.kept is None else self.kept.state(),
        }

    def load(self, saved: Mapping[str, object]) -> None:
        self.setting = cast(int, saved["setting"])
        self.next_setting = cast(int, saved["next_setting"])
        if self.kept is not None:
            self.kept.load(cast(Mapping[str, Mapping[str, Tensor]], saved["samples"]))

    def explain(self) -> dict[str, object]:
        count = self.counts
        return {
            "method": format_spec(self.method),
            "messages": count.messages,
            "bytes": count.nbytes,
            "dense_bytes": count.dense_bytes,
            "relative_error": count.relative_error,
            "samples": 0 if self.kept is None else len(self.kept.known()),
        }


class Sender:
    """The end that encodes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        config = channel.settings.controller
        self.search = None if config is None else Search(config, len(channel.settings.methods))
        self._errors: dict[int, float] = {}
        self._reference = 0.0

    def begin_step(self, previous_s: float | None) -> None:
        """Prepares for a step; `previous_s` is the duration of the one before, if it is known."""
        channel = self.channel
        channel.begin_step()
        self._note_errors()
        if self.search is None or not channel.step.trains:
            return
        if previous_s is not None:
            self.search.add_step(previous_s)
        window = channel.settings.controller.window if channel.settings.controller else 1
        if channel.forms and channel.step.number % window == 0:
            channel.next_setting = self.search.choose(channel.setting, self._bytes_of_settings())

    def _bytes_of_settings(self) -> list[int]:
        forms, microbatches = self.channel.forms.values(), self.channel.step.microbatches
        methods = self.channel.settings.methods
        return [microbatches * sum(body_bytes(m, form) for form in forms) for m in methods]

    def encode(self, microbatch: int, slot: int, x: Tensor) -> Tensor:
        """Returns the message of a tensor."""
        start_s, channel, form = perf_counter(), self.channel, Form.of(x)
        channel.check_form(slot, form)
        if channel.is_raw(microbatch, form):
            body = raw(x)
            if microbatch == 0 and form.dtype.is_floating_point and channel.is_known(microbatch):
                base = channel.base(microbatch, slot, form)
                self._measure(slot, x, x if base is None else x - base, form)
            channel.keep(microbatch, slot, x)
        else:
            body = self._encode(microbatch, slot, x, form)
        nbytes = channel.message_bytes(microbatch, form)
        found = message.message(channel.header(microbatch, form, body.numel()), body, nbytes)
        counts = channel.counts
        counts.messages += 1
        counts.nbytes += nbytes
        counts.dense_bytes += form.nbytes
        channel.meter.point_to_point(nbytes, 0)
        channel.meter.add_time(perf_counter() - start_s, 0.0, 0.0)
        return found

    def _encode(self, microbatch: int, slot: int, x: Tensor, form: Form) -> Tensor:
        channel = self.channel
        base, ctx = channel.base(microbatch, slot, form), channel.context(microbatch, slot, form)
        x = x.detach().to(torch.float32)
        sent = x if base is None else x - base
        body = encode(channel.method, sent, ctx)
        if base is not None:
            channel.keep(microbatch, slot, base + decode(channel.method, body, ctx))
        if microbatch == 0:
            self._measure(slot, x, sent, form)
        return body

    def _measure(self, slot: int, x: Tensor, sent: Tensor, form: Form) -> None:
        """Measures the errors of one micro-batch, of all settings if a controller chooses."""
        channel, config = self.channel, self.channel.settings.controller
        every = SAMPLE_EVERY if config is None else config.window
        if channel.step.number % every != 1:
            return
        tried = range(len(channel.settings.methods)) if config else [channel.setting]
        ctx = channel.context(0, slot, form)
        self._reference += float(x.detach().to(torch.float32).square().sum())
        for setting in tried:
            method, error = channel.settings.methods[setting], 0.0
            if not sends_raw(method, form):
                sent32 = sent.detach().to(torch.float32)
                decoded = decode(method, encode(method, sent32, ctx), ctx)
                error = float((sent32 - decoded).square().sum())
            self._errors[setting] = self._errors.get(setting, 0.0) + error

    def _note_errors(self) -> None:
        """Takes over what was measured in the step before."""
        for setting, error in self._errors.items():
            share = error / self._reference if self._reference else 0.0
            if setting == self.channel.setting or self.search is None:
                self.channel.counts.relative_error = share**0.5
            if self.search is not None:
                self.search.add_gain(setting, 1 - share)
        self._errors, self._reference = {}, 0.0


class Posted(NamedTuple):
    """A message that is on its way, and the tensor that it is for."""

    slot: int
    wire: Tensor
    target: Tensor


class Receiver:
    """The end that decodes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.posted: dict[int, list[Posted]] = {}
        self.count = 0
        """Messages that were posted in this step."""
        self.slots = 0
        """Tensors of a micro-batch, as far as they can be known before the first ones arrive."""

    def begin_step(self) -> None:
        self.channel.begin_step()
        self.posted, self.count = {}, 0

    def post(self, microbatch: int, slot: int, target: Tensor) -> Tensor:
        """Returns the buffer for the message that `fill` will decode into `target`."""
        form = Form.of(target)
        self.channel.check_form(slot, form)
        wire = message.room(self.channel.message_bytes(microbatch, form), target.device)
        self.posted.setdefault(microbatch, []).append(Posted(slot, wire, target))
        self.count += 1
        return wire

    def fill(self, microbatch: int) -> None:
        """Decodes the messages of a micro-batch; raises the error of a stage that has failed."""
        channel = self.channel
        for slot, wire, target in self.posted.pop(microbatch, []):
            start_s, form = perf_counter(), Form.of(target)
            body = self._checked(microbatch, form, wire)
            if channel.is_raw(microbatch, form):
                values = from_raw(body, form)
                channel.keep(microbatch, slot, values)
            else:
                base = channel.base(microbatch, slot, form)
                values = decode(channel.method, body, channel.context(microbatch, slot, form))
                if base is not None:
                    values = channel.keep(microbatch, slot, base + values)
            # Autograd knows the target as a leaf from the step before.
            target.detach().copy_(values)
            channel.counts.messages += 1
            channel.counts.nbytes += wire.numel()
            channel.counts.dense_bytes += form.nbytes
            channel.meter.point_to_point(0, wire.numel())
            channel.meter.add_time(0.0, 0.0, perf_counter() - start_s)

    def _checked(self, microbatch: int, form: Form, wire: Tensor) -> Tensor:
        """Returns the body of a message, and notes the setting of the next step."""
        channel = self.channel
        header, body = message.read(wire)
        expected = channel.header(microbatch, form, header.nbytes)
        if not header.same_place(expected):
            raise PeerError(
                f"{channel.settings.name}: received {_place_in_words(header)} where "
                f"{_place_in_words(expected)} was expected; the stages are out of step"
            )
        if not 0 <= header.next_setting < len(channel.settings.methods):
            raise WireError(
                f"{channel.settings.name}: message announces setting {header.next_setting} of "
                f"{len(channel.settings.methods)}"
            )
        channel.next_setting = header.next_setting
        return body


def _place_in_words(header: Header) -> str:
    """Returns what identifies a message, in words."""
    kind = "tensor" if header.kind == message.RAW else "message"
    samples = f", samples {header.samples & 0xFFFFFFFF:08x}" if header.samples else ""
    return (
        f"a {kind} of step {header.step}, micro-batch {header.microbatch}, setting "
        f"{header.setting}{samples}"
    )
