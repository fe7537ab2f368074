"""All that Autopilot knows of its settings: what a step takes with them, and what it is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from laconic.comm.meter import ring_bytes
from laconic.control.clock import Lap
from laconic.control.costs import APART, Costs, Link, Said
from laconic.control.courses import Option, best_course
from laconic.control.horizon import FEW
from laconic.control.ladder import Rung, is_whole
from laconic.control.layer import Layer, load_layer
from laconic.control.losses import Kind, progress

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
            "recent": [Lap(*lap) for lap in costs["recent"]],
            "before": None if before is None else Lap(*before),
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
