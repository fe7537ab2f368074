"""Cost model: predicts step time and progress at other settings from timings of past steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from gradwire.comm.meter import ring_bytes
from gradwire.control._autopilot.allocation import Option, best_allocation
from gradwire.control._autopilot.budget import MIN_REMAINING
from gradwire.control._autopilot.candidates import GridPoint, is_uncompressed
from gradwire.control._autopilot.error_model import (
    ErrorKind,
    LayerModel,
    load_layer,
    relative_progress,
)
from gradwire.control.timing import StepTiming

RECENT = 5
"""Medians are taken over so many timings: they tolerate two outliers, and follow a link in three
steps."""
ENOUGH = 3
"""A setting is judged after so many timings: the fewest whose median tolerates one outlier."""
MIN_BYTE_SHARE = 0.1
"""At least this share of the wire time is attributed to bytes instead of latency: with none there
would be no reason to compress more, and so nothing to learn from when the link becomes slow."""
MIN_BYTES_RATIO = 1.5
"""Two timings separate latency from bytes if one sends so many times as much as the other: a time
that is wrong by a twentieth then makes the share of the bytes wrong by a fifth at most."""


class Traffic(NamedTuple):
    """Message bytes of one rank in a step, and the elements that were encoded."""

    dense_bytes: int
    compressed_bytes: int
    elements: Mapping[int, int]
    """Number of gradient elements by grid index."""


class LinkEstimate(NamedTuple):
    """The current speed of steps.

    The exchange takes `fixed_s` (latency, and waiting for slower ranks) whatever is sent, and
    `byte_s` for each byte.
    """

    compute_s: float
    """Step time without the exchange."""
    exchange_s: float
    exposed_s: float
    """Part of the exchange that is not overlapped with computation."""
    fixed_s: float
    byte_s: float

    def step_s(self, extra_s: float) -> float:
        """Predicts the duration of a step whose exchange takes `extra_s` more than now.

        Additional time is not overlapped; of less time, the share that is overlapped stays.
        """
        if extra_s >= 0 or self.exchange_s <= 0:
            return self.compute_s + self.exposed_s + max(extra_s, 0.0)
        left = max(0.0, 1 + extra_s / self.exchange_s)
        return self.compute_s + self.exposed_s * left


@dataclass
class TimeModel:
    """Durations learnt from step timings, the same on every rank."""

    sent_per_dense_byte: float
    """Bytes that a rank sends for each byte of a message in 16 or 32 bits per element."""
    sent_per_compressed_byte: float
    """Bytes that a rank sends for each byte of a compressed message."""
    recent: list[StepTiming] = field(default_factory=list)
    fixed_s: float | None = None
    before_change: StepTiming | None = None
    """Median timing before the last change of traffic, until there are enough timings after it."""
    traffic: Traffic | None = None
    """Traffic of the last timing."""
    since_change: int = 0
    """Number of timings since the traffic changed."""
    codec_s_per_element: dict[int, float] = field(default_factory=dict)
    """Encoding and decoding time per element, by grid index."""

    def add(self, traffic: Traffic, timing: StepTiming) -> None:
        """Adds the timing of a step with this traffic."""
        if self.traffic is not None and traffic != self.traffic:
            sent_bytes = timing.sent_bytes - self.recent[-1].sent_bytes
            self._learn_sent_bytes(self.traffic, traffic, sent_bytes)
            self.before_change, self.since_change = _median_timing(self.recent), 0
        self.recent, self.traffic = [*self.recent, timing][-RECENT:], traffic
        self.since_change += 1
        codec_s = median(timing.codec_s for timing in self.recent[-self.since_change :])
        self._learn_codec_time(traffic, codec_s)
        if self.since_change == ENOUGH and self.before_change is not None:
            self._learn_fixed_time(self.before_change, _median_timing(self.recent[-ENOUGH:]))
        if self.fixed_s is not None:
            # Contention may have been taken for latency: no call is shorter than the latency.
            limit_s = (1 - MIN_BYTE_SHARE) * _median_timing(self.recent).wire_s
            self.fixed_s = min(self.fixed_s, limit_s)

    @property
    def has_enough(self) -> bool:
        return self.since_change >= ENOUGH

    def link(self) -> LinkEstimate:
        """Returns the link as seen in the recent timings."""
        now = _median_timing(self.recent)
        fixed_s = self.fixed_s or 0.0
        byte_s = median(
            max(timing.wire_s - fixed_s, MIN_BYTE_SHARE * timing.wire_s)
            / max(timing.sent_bytes, 1.0)
            for timing in self.recent
        )
        compute_s = median(max(timing.step_s - timing.exposed_s, 0.0) for timing in self.recent)
        return LinkEstimate(compute_s, now.codec_s + now.wire_s, now.exposed_s, fixed_s, byte_s)

    def codec_s(self, index: int, elements: int) -> float:
        """Returns encoding and decoding time as measured at this setting or at the nearest one.

        Zero for uncompressed settings until they have been used.
        """
        tried = [
            other
            for other in self.codec_s_per_element
            if other == index or not (is_uncompressed(other) or is_uncompressed(index))
        ]
        nearest = min(tried, key=lambda other: (abs(other - index), other), default=None)
        return 0.0 if nearest is None else elements * self.codec_s_per_element[nearest]

    def _learn_codec_time(self, traffic: Traffic, codec_s: float) -> None:
        """Splits the measured time among settings in proportion to their expected times."""
        expected_s = sum(self.codec_s(index, n) for index, n in traffic.elements.items())
        if expected_s > 0:
            found = {i: self.codec_s(i, 1) * codec_s / expected_s for i in traffic.elements}
        else:
            found = dict.fromkeys(traffic.elements, codec_s / sum(traffic.elements.values()))
        self.codec_s_per_element = {**self.codec_s_per_element, **found}

    def _learn_sent_bytes(self, old: Traffic, new: Traffic, sent_bytes: float) -> None:
        """Learns from a change of traffic how many bytes a rank sends per byte of a message."""
        dense = new.dense_bytes - old.dense_bytes
        compressed = new.compressed_bytes - old.compressed_bytes
        dense_sent = self.sent_per_dense_byte * dense
        compressed_sent = self.sent_per_compressed_byte * compressed
        if compressed and abs(compressed_sent) >= abs(dense_sent):
            found = (sent_bytes - dense_sent) / compressed
            self.sent_per_compressed_byte = found if found > 0 else self.sent_per_compressed_byte
        elif dense:
            found = (sent_bytes - compressed_sent) / dense
            self.sent_per_dense_byte = found if found > 0 else self.sent_per_dense_byte

    def _learn_fixed_time(self, one: StepTiming, other: StepTiming) -> None:
        """Learns from two settings which part of the wire time does not depend on bytes."""
        less, more = sorted((one, other), key=lambda timing: timing.sent_bytes)
        self.before_change = None
        # A single rank sends nothing at any setting.
        if more.sent_bytes <= MIN_BYTES_RATIO * less.sent_bytes:
            return
        byte_s = max(0.0, more.wire_s - less.wire_s) / (more.sent_bytes - less.sent_bytes)
        new = max(0.0, less.wire_s - byte_s * less.sent_bytes)
        self.fixed_s = new if self.fixed_s is None else (self.fixed_s + new) / 2


def _median_timing(timings: Sequence[StepTiming]) -> StepTiming:
    return StepTiming(*(median(column) for column in zip(*timings, strict=True)))


REFERENCE_BYTES = 1_000_000
"""Length of the message from which the bytes sent by a ring, per byte of a message, are computed
before they are measured."""


class Prediction(NamedTuple):
    """Predicted bytes, step time and progress with a setting for every layer."""

    indices: dict[str, int]
    """Grid index by layer."""
    sent_bytes: float
    step_s: float
    progress: float
    """Progress of a step relative to a dense one."""

    @property
    def cost_s(self) -> float:
        """Seconds for the progress of one dense step."""
        return self.step_s / self.progress


class CostModel:
    """Predicts time from step timings and error from samples, interpolating between both."""

    def __init__(self, grid: Sequence[GridPoint], kind: ErrorKind, world_size: int) -> None:
        self.grid, self.kind = list(grid), kind
        self._world_size = world_size
        self.reset_times()
        self.layers: dict[str, LayerModel] = {}
        self.remaining_steps = MIN_REMAINING

    def reset_times(self) -> None:
        """Discards all timings; assumes a ring for dense messages and a gather for others."""
        ring = ring_bytes(REFERENCE_BYTES, self._world_size) / REFERENCE_BYTES
        self.times = TimeModel(ring, self._world_size - 1.0)

    def add_layers(self, shapes: Mapping[str, Sequence[int]]) -> None:
        # In the same order on all ranks, since floating-point sums depend on it.
        for name in sorted(shapes.keys() - self.layers.keys()):
            self.layers[name] = LayerModel(shapes[name], self.grid)

    @property
    def ready(self) -> bool:
        """True if there are enough timings and samples to decide."""
        sampled = any(layer.relative.errors for layer in self.layers.values())
        return self.times.has_enough and sampled

    def traffic(self, indices: Mapping[str, int]) -> Traffic:
        """Returns the traffic of a step with these settings."""
        lengths, elements = [0, 0], dict[int, int]()
        for name, layer in self.layers.items():
            index = layer.effective(indices[name])
            lengths[is_uncompressed(index)] += layer.message_bytes[index]
            elements[index] = elements.get(index, 0) + layer.numel
        return Traffic(lengths[True], lengths[False], elements)

    def uniform(self, index: int) -> dict[str, int]:
        return dict.fromkeys(self.layers, index)

    def predict(self, indices: Mapping[str, int]) -> Prediction:
        link, now = self.times.link(), self.times.traffic
        error = sum(layer.error(indices[name], self.kind) for name, layer in self.layers.items())
        sent_bytes = self.times.recent[-1].sent_bytes
        extra_s = 0.0
        if now is not None:
            new = self.traffic(indices)
            extra_bytes = self._sent_bytes(new) - self._sent_bytes(now)
            extra_s = link.byte_s * extra_bytes + self._codec_s(new) - self._codec_s(now)
            sent_bytes += extra_bytes
        progress = self._progress(error, self._energy())
        return Prediction(dict(indices), sent_bytes, link.step_s(extra_s), progress)

    def best_uniform(self, current: Mapping[str, int], min_progress: float) -> Prediction:
        """Returns the cheapest setting shared by all layers with at least this progress."""
        reachable = [layer.reachable(current[name]) for name, layer in self.layers.items()]
        indices = {0, *(index for some in reachable for index in some)}
        predictions = [self.predict(self.uniform(index)) for index in sorted(indices)]
        allowed = (p for p in predictions if p.progress >= min_progress)
        return min(allowed, key=lambda prediction: prediction.cost_s)

    def best_per_layer(self, current: Mapping[str, int], min_progress: float) -> Prediction:
        """Returns the cheapest combination of settings with at least this progress.

        With few layers, a setting shared by all may lie between the corners of the hull.
        """
        link, base = self.times.link(), self.times.traffic
        assert base is not None
        now_s, energy = link.byte_s * self._sent_bytes(base) + self._codec_s(base), self._energy()

        def objective(cost_s: float, error: float) -> float:
            progress = self._progress(error, energy)
            step_s = link.step_s(cost_s - now_s)
            return step_s / progress if progress >= min_progress else float("inf")

        options = [self._options(layer, current[name], link) for name, layer in self.layers.items()]
        allocation = best_allocation(options, objective)
        mixed = self.predict(dict(zip(self.layers, allocation.indices, strict=True)))
        uniform = self.best_uniform(current, min_progress)
        return min(mixed, uniform, key=lambda prediction: prediction.cost_s)

    def probe(self, current: Prediction, index: int) -> Prediction | None:
        """Returns the next weaker setting that sends clearly more, to separate latency from bytes.

        None once they have been separated.
        """
        if self.times.fixed_s is not None:
            return None
        weaker = (self.predict(self.uniform(i)) for i in range(index - 1, -1, -1))
        limit = MIN_BYTES_RATIO * current.sent_bytes
        return next((p for p in weaker if p.sent_bytes > limit), None)

    def explain(self) -> dict[str, object]:
        """Returns the link, and predictions with each setting for all layers, for `stats()`."""
        if not (self.times.recent and self.layers and self._energy()):
            return {}
        link = self.times.link()
        predictions = [self.predict(self.uniform(index)) for index in range(len(self.grid))]
        return {
            "compute_ms": link.compute_s * 1e3,
            "rate_bits": 8 / max(link.byte_s, 1e-12),
            "idle_ms": link.fixed_s * 1e3,
            "settings": {
                point.label(): {
                    "step_ms": prediction.step_s * 1e3,
                    "worth": prediction.progress,
                    "sent_bytes": prediction.sent_bytes,
                    "tried": index in self.times.codec_s_per_element,
                }
                for index, (point, prediction) in enumerate(
                    zip(self.grid, predictions, strict=True)
                )
            },
        }

    def _options(self, layer: LayerModel, current: int, link: LinkEstimate) -> list[Option]:
        found = []
        dense, compressed = self.times.sent_per_dense_byte, self.times.sent_per_compressed_byte
        for index in layer.reachable(current):
            sent_per_byte = dense if is_uncompressed(index) else compressed
            cost_s = link.byte_s * sent_per_byte * layer.message_bytes[index]
            cost_s += self.times.codec_s(index, layer.numel)
            found.append(Option(index, cost_s, layer.error(index, self.kind)))
        return found

    def _energy(self) -> float:
        return sum(layer.relative.energy for layer in self.layers.values())

    def _progress(self, error: float, energy: float) -> float:
        relative = error / energy if energy else 0.0
        return relative_progress(relative, self.kind, self.remaining_steps)

    def _sent_bytes(self, traffic: Traffic) -> float:
        dense = self.times.sent_per_dense_byte * traffic.dense_bytes
        return dense + self.times.sent_per_compressed_byte * traffic.compressed_bytes

    def _codec_s(self, traffic: Traffic) -> float:
        return sum(self.times.codec_s(index, n) for index, n in traffic.elements.items())

    def state_dict(self) -> dict[str, object]:
        traffic, before = self.times.traffic, self.times.before_change
        times = asdict(self.times) | {
            "recent": [list(timing) for timing in self.times.recent],
            "before_change": None if before is None else list(before),
            "traffic": None if traffic is None else [*traffic[:2], _with_str_keys(traffic[2])],
            "codec_s_per_element": _with_str_keys(self.times.codec_s_per_element),
        }
        layers = {name: layer.state_dict() for name, layer in self.layers.items()}
        return {"times": times, "layers": layers, "remaining_steps": self.remaining_steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        times = saved["times"]
        traffic, before = times["traffic"], times["before_change"]
        plain = {
            "recent": [StepTiming(*timing) for timing in times["recent"]],
            "before_change": None if before is None else StepTiming(*before),
            "traffic": (
                None
                if traffic is None
                else Traffic(traffic[0], traffic[1], _with_int_keys(traffic[2]))
            ),
            "codec_s_per_element": _with_int_keys(times["codec_s_per_element"]),
        }
        self.times = TimeModel(**{**times, **plain})
        self.layers = {n: load_layer(layer, self.grid) for n, layer in saved["layers"].items()}
        self.remaining_steps = saved["remaining_steps"]


def _with_str_keys(by_index: Mapping[int, Any]) -> dict[str, Any]:
    return {str(index): value for index, value in by_index.items()}


def _with_int_keys(by_name: Mapping[str, Any]) -> dict[int, Any]:
    return {int(index): value for index, value in by_name.items()}
