"""Cost model: predicts step time and progress at other settings from timings of past steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from gradwire.comm.meter import ring_bytes
from gradwire.control._autopilot.allocation import Option, best_course
from gradwire.control._autopilot.budget import FEW
from gradwire.control._autopilot.candidates import Rung, is_whole
from gradwire.control._autopilot.error_model import Kind, Layer, load_layer, progress
from gradwire.control.timing import StepTiming

RECENT = 5
"""Medians are of so many laps: they bear two odd ones, and follow a link in three steps."""
ENOUGH = 3
"""So many laps at a setting have to pass before it is judged: the fewest whose median bears one."""
LEAST = 0.1
"""At least this share of the time on the wire is put down to bytes, and not to waiting: with none
there would be no reason to say less, and so nothing to learn from when the link becomes slow."""
APART = 1.5
"""Two laps tell waiting from bytes if one sends so many times as much as the other: a time that is
wrong by a twentieth then makes the bytes' share wrong by a fifth at most."""


class Said(NamedTuple):
    """What the layers say in a step, as messages of one rank."""

    whole_bytes: int
    part_bytes: int
    elements: Mapping[int, int]
    """How many elements of gradients are said at each place on the ladder."""


class Link(NamedTuple):
    """How steps go now. The exchange takes `idle_s` (latency, and waiting for slower ranks)
    whatever is said, and `byte_s` for each byte."""

    compute_s: float
    """What of a step is not the exchange."""
    exchange_s: float
    waited_s: float
    """What of the exchange is not hidden behind the computation."""
    idle_s: float
    byte_s: float

    def step_s(self, more_s: float) -> float:
        """A step whose exchange takes so much more than now.

        What is more than now is not hidden; of less, as large a share as now is.
        """
        if more_s >= 0 or self.exchange_s <= 0:
            return self.compute_s + self.waited_s + max(more_s, 0.0)
        left = max(0.0, 1 + more_s / self.exchange_s)
        return self.compute_s + self.waited_s * left


@dataclass
class Costs:
    """Plain numbers, the same on every rank."""

    whole_sent: float
    """Bytes that a rank sends for a byte of a message of 16 or 32 bits an element."""
    part_sent: float
    """The same for messages of the method."""
    recent: list[StepTiming] = field(default_factory=list)
    idle_s: float | None = None
    before: StepTiming | None = None
    """The usual lap before the last change of setting, until there are enough after it."""
    said: Said | None = None
    """In the last lap."""
    laps: int = 0
    """Since something else was said."""
    element_s: dict[int, float] = field(default_factory=dict)
    """Encoding and decoding of an element, by place on the ladder."""

    def add(self, said: Said, lap: StepTiming) -> None:
        """A lap in which this was said."""
        if self.said is not None and said != self.said:
            self._compare(self.said, said, lap.sent_bytes - self.recent[-1].sent_bytes)
            self.before, self.laps = _usual(self.recent), 0
        self.recent, self.said = [*self.recent, lap][-RECENT:], said
        self.laps += 1
        self._blame(said, median(lap.work_s for lap in self.recent[-self.laps :]))
        if self.laps == ENOUGH and self.before is not None:
            self._tell_apart(self.before, _usual(self.recent[-ENOUGH:]))
        if self.idle_s is not None:
            # A busy moment may have been taken for latency: no call is shorter than that.
            self.idle_s = min(self.idle_s, (1 - LEAST) * _usual(self.recent).wire_s)

    @property
    def enough(self) -> bool:
        return self.laps >= ENOUGH

    def link(self) -> Link:
        """As the last laps were."""
        now = _usual(self.recent)
        idle_s = self.idle_s or 0.0
        byte_s = median(
            max(lap.wire_s - idle_s, LEAST * lap.wire_s) / max(lap.sent_bytes, 1.0)
            for lap in self.recent
        )
        compute_s = median(max(lap.step_s - lap.waited_s, 0.0) for lap in self.recent)
        return Link(compute_s, now.work_s + now.wire_s, now.waited_s, idle_s, byte_s)

    def work_s(self, place: int, elements: int) -> float:
        """Encoding and decoding: as it was there, or at the place most like it.

        None where all is said, until it was tried.
        """
        tried = [p for p in self.element_s if p == place or not (is_whole(p) or is_whole(place))]
        near = min(tried, key=lambda p: (abs(p - place), p), default=None)
        return 0.0 if near is None else elements * self.element_s[near]

    def _blame(self, said: Said, work_s: float) -> None:
        """Each place took as large a share of the work as was to be expected."""
        expected_s = sum(self.work_s(place, n) for place, n in said.elements.items())
        if expected_s > 0:
            found = {p: self.work_s(p, 1) * work_s / expected_s for p in said.elements}
        else:
            found = dict.fromkeys(said.elements, work_s / sum(said.elements.values()))
        self.element_s = {**self.element_s, **found}

    def _compare(self, old: Said, new: Said, sent_bytes: float) -> None:
        """Learns from a change how many bytes leave a rank for one of a message."""
        whole = new.whole_bytes - old.whole_bytes
        part = new.part_bytes - old.part_bytes
        if part and self.part_sent * abs(part) >= self.whole_sent * abs(whole):
            found = (sent_bytes - self.whole_sent * whole) / part
            self.part_sent = found if found > 0 else self.part_sent
        elif whole:
            found = (sent_bytes - self.part_sent * part) / whole
            self.whole_sent = found if found > 0 else self.whole_sent

    def _tell_apart(self, one: StepTiming, other: StepTiming) -> None:
        """Learns from two settings what of the time is due to bytes, and what is not."""
        less, more = sorted((one, other), key=lambda lap: lap.sent_bytes)
        self.before = None
        # A rank that is alone sends nothing at any setting.
        if more.sent_bytes <= APART * less.sent_bytes:
            return
        byte_s = max(0.0, more.wire_s - less.wire_s) / (more.sent_bytes - less.sent_bytes)
        new = max(0.0, less.wire_s - byte_s * less.sent_bytes)
        self.idle_s = new if self.idle_s is None else (self.idle_s + new) / 2


def _usual(laps: Sequence[StepTiming]) -> StepTiming:
    return StepTiming(*(median(column) for column in zip(*laps, strict=True)))


LONG = 1_000_000
"""Bytes of a message that tell how many of a ring's a byte of it makes."""


class Spot(NamedTuple):
    """A setting for every layer, as it looks from here."""

    places: dict[str, int]
    """On the ladder, by layer."""
    sent_bytes: float
    step_s: float
    worth: float
    """What a step is worth beside a dense one."""

    @property
    def cost_s(self) -> float:
        """Seconds for what a dense step is worth."""
        return self.step_s / self.worth


class Chart:
    """Costs by the laps of steps, losses by samples; between them what is likely."""

    def __init__(self, rungs: Sequence[Rung], kind: Kind, size: int) -> None:
        self.rungs, self.kind = list(rungs), kind
        self._size = size
        self.forget_costs()
        self.layers: dict[str, Layer] = {}
        self.ahead = FEW
        """Steps that are taken to follow."""

    def forget_costs(self) -> None:
        """Knows only what a ring sends of a message, and a gather."""
        self.costs = Costs(ring_bytes(LONG, self._size) / LONG, self._size - 1.0)

    def meet(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Learns which layers there are."""
        # In the same order on all ranks, since sums depend on it.
        for name in sorted(shapes.keys() - self.layers.keys()):
            self.layers[name] = Layer(shapes[name], self.rungs)

    @property
    def ready(self) -> bool:
        """Whether there is enough to decide by."""
        return self.costs.enough and any(layer.losses.error for layer in self.layers.values())

    def said(self, places: Mapping[str, int]) -> Said:
        """What layers say at these places."""
        parts, elements = [0, 0], dict[int, int]()
        for name, layer in self.layers.items():
            place = layer.effective(places[name])
            parts[is_whole(place)] += layer.lengths[place]
            elements[place] = elements.get(place, 0) + layer.elements
        return Said(parts[True], parts[False], elements)

    def uniform(self, place: int) -> dict[str, int]:
        return dict.fromkeys(self.layers, place)

    def spot(self, places: Mapping[str, int]) -> Spot:
        link, now = self.costs.link(), self.costs.said
        lost = sum(layer.lost(places[name], self.kind) for name, layer in self.layers.items())
        sent_bytes = self.costs.recent[-1].sent_bytes
        more_s = 0.0
        if now is not None:
            then = self.said(places)
            more_bytes = self._sent(then) - self._sent(now)
            more_s = link.byte_s * more_bytes + self._work_s(then) - self._work_s(now)
            sent_bytes += more_bytes
        return Spot(
            dict(places), sent_bytes, link.step_s(more_s), self._worth(lost, self._energy())
        )

    def best_of_all(self, here: Mapping[str, int], least: float) -> Spot:
        """The best setting for all layers alike whose steps are worth so much at least."""
        open_to = [layer.open_to(here[name]) for name, layer in self.layers.items()]
        places = {0, *(place for some in open_to for place in some)}
        spots = [self.spot(self.uniform(place)) for place in sorted(places)]
        return min((s for s in spots if s.worth >= least), key=lambda spot: spot.cost_s)

    def best_by_layer(self, here: Mapping[str, int], least: float) -> Spot:
        """The same with a setting for each layer.

        Where layers are few, one setting for all may lie between what the hull offers.
        """
        link, base = self.costs.link(), self.costs.said
        assert base is not None
        now_s, energy = link.byte_s * self._sent(base) + self._work_s(base), self._energy()

        def judge(cost_s: float, lost: float) -> float:
            worth = self._worth(lost, energy)
            return link.step_s(cost_s - now_s) / worth if worth >= least else float("inf")

        options = [self._options(layer, here[name], link) for name, layer in self.layers.items()]
        course = best_course(options, judge)
        mixed = self.spot(dict(zip(self.layers, course.places, strict=True)))
        return min(mixed, self.best_of_all(here, least), key=lambda spot: spot.cost_s)

    def other(self, here: Spot, place: int) -> Spot | None:
        """The nearest that says clearly more, to learn what of the time bytes are to blame for."""
        if self.costs.idle_s is not None:
            return None
        spots = (self.spot(self.uniform(more)) for more in range(place - 1, -1, -1))
        return next((s for s in spots if s.sent_bytes > APART * here.sent_bytes), None)

    def explain(self) -> dict[str, object]:
        """The link, and what steps would be with each setting for all layers, for people."""
        if not (self.costs.recent and self.layers and self._energy()):
            return {}
        link, spots = (
            self.costs.link(),
            [self.spot(self.uniform(p)) for p in range(len(self.rungs))],
        )
        return {
            "compute_ms": link.compute_s * 1e3,
            "rate_bits": 8 / max(link.byte_s, 1e-12),
            "idle_ms": link.idle_s * 1e3,
            "settings": {
                rung.words(): {
                    "step_ms": spot.step_s * 1e3,
                    "worth": spot.worth,
                    "sent_bytes": spot.sent_bytes,
                    "tried": place in self.costs.element_s,
                }
                for place, (rung, spot) in enumerate(zip(self.rungs, spots, strict=True))
            },
        }

    def _options(self, layer: Layer, here: int, link: Link) -> list[Option]:
        found = []
        for place in layer.open_to(here):
            sent = self.costs.whole_sent if is_whole(place) else self.costs.part_sent
            cost_s = link.byte_s * sent * layer.lengths[place]
            cost_s += self.costs.work_s(place, layer.elements)
            found.append(Option(place, cost_s, layer.lost(place, self.kind)))
        return found

    def _energy(self) -> float:
        return sum(layer.losses.energy for layer in self.layers.values())

    def _worth(self, lost: float, energy: float) -> float:
        return progress(lost / energy if energy else 0.0, self.kind, self.ahead)

    def _sent(self, said: Said) -> float:
        return self.costs.whole_sent * said.whole_bytes + self.costs.part_sent * said.part_bytes

    def _work_s(self, said: Said) -> float:
        return sum(self.costs.work_s(place, n) for place, n in said.elements.items())

    def save(self) -> dict[str, object]:
        said, before = self.costs.said, self.costs.before
        costs = asdict(self.costs) | {
            "recent": [list(lap) for lap in self.costs.recent],
            "before": None if before is None else list(before),
            "said": None if said is None else [said[0], said[1], _named(said[2])],
            "element_s": _named(self.costs.element_s),
        }
        layers = {name: layer.save() for name, layer in self.layers.items()}
        return {"costs": costs, "layers": layers, "ahead": self.ahead}

    def load(self, saved: Mapping[str, Any]) -> None:
        costs = saved["costs"]
        said, before = costs["said"], costs["before"]
        plain = {
            "recent": [StepTiming(*lap) for lap in costs["recent"]],
            "before": None if before is None else StepTiming(*before),
            "said": None if said is None else Said(said[0], said[1], _placed(said[2])),
            "element_s": _placed(costs["element_s"]),
        }
        self.costs = Costs(**{**costs, **plain})
        self.layers = {n: load_layer(layer, self.rungs) for n, layer in saved["layers"].items()}
        self.ahead = saved["ahead"]


def _named(by_place: Mapping[int, Any]) -> dict[str, Any]:
    return {str(place): value for place, value in by_place.items()}


def _placed(by_name: Mapping[str, Any]) -> dict[int, Any]:
    return {int(place): value for place, value in by_name.items()}
