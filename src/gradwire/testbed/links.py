"""Describes the links of an emulated network: rates, delay and loss by worker, islands, changes.

A file of links is JSON: the keys of a link (`rate`, `up`, `down`, `delay`, `jitter`, `loss`) are
those of all workers; `workers` has others for some of them, `islands` lists workers that share a
switch, `between` is the link of each island to the others, and `changes` are links that change
while workers run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.comm.cost_model import parse_latency, parse_rate
from gradwire.errors import ConfigError

_KEYS = ("rate", "up", "down", "delay", "jitter", "loss")
_FILE_KEYS = (*_KEYS, "workers", "islands", "between", "changes")


@dataclass(frozen=True)
class LinkShape:
    """One link: rates in bits per second, None if unlimited; delay and loss of what it sends up."""

    up_bits: int | None = None
    down_bits: int | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    """The share of packets that is lost."""

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise ConfigError(f"loss: must be a share from 0 to below 1, got {self.loss:g}")
        if self.jitter_s > self.delay_s:
            raise ConfigError(
                f"jitter: must not exceed the delay of {self.delay_s * 1e3:g} ms, got "
                f"{self.jitter_s * 1e3:g} ms"
            )

    @property
    def slowest_bits(self) -> int | None:
        """The rate that limits a collective, in which every worker sends and receives."""
        known = [bits for bits in (self.up_bits, self.down_bits) if bits is not None]
        return min(known) if known else None

    def with_options(self, options: Mapping[str, object]) -> "LinkShape":
        """Returns the link with some settings replaced; raises ConfigError for unknown ones."""
        unknown = sorted(options.keys() - set(_KEYS))
        if unknown:
            raise ConfigError(f"links: unknown {unknown}, expected some of {[*_KEYS]}")
        found = self
        if "rate" in options:
            bits = _rate("rate", options["rate"])
            found = replace(found, up_bits=bits, down_bits=bits)
        if "up" in options:
            found = replace(found, up_bits=_rate("up", options["up"]))
        if "down" in options:
            found = replace(found, down_bits=_rate("down", options["down"]))
        # Together, since each must fit to the other.
        return replace(
            found,
            delay_s=_latency("delay", options.get("delay"), found.delay_s),
            jitter_s=_latency("jitter", options.get("jitter"), found.jitter_s),
            loss=_share(options.get("loss"), found.loss),
        )


@dataclass(frozen=True)
class LinkChange:
    """New settings of the links of some workers, from a time after the start on."""

    at_s: float
    options: Mapping[str, object]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class NetworkPlan:
    """The links of all workers."""

    links: tuple[LinkShape, ...]
    islands: tuple[tuple[int, ...], ...] = ()
    between: LinkShape = LinkShape()
    """The link of each island's switch to the others."""
    changes: tuple[LinkChange, ...] = ()

    def __post_init__(self) -> None:
        members = sorted(worker for island in self.islands for worker in island)
        if self.islands and members != [*range(len(self.links))]:
            raise ConfigError(
                f"links: islands must name each worker from 0 to {len(self.links) - 1} once, got "
                f"{[list(island) for island in self.islands]}"
            )
        for change in self.changes:
            for worker in change.workers:
                self.links[worker].with_options(change.options)

    def island_of(self, worker: int) -> int | None:
        found = [i for i, island in enumerate(self.islands) if worker in island]
        return found[0] if found else None


def plan_network(workers: int, options: Mapping[str, str], path: Path | None) -> NetworkPlan:
    """Returns the network of some options, or of a file whose common link they replace."""
    content = {} if path is None else _read(path)
    common = LinkShape().with_options(
        {**{k: v for k, v in content.items() if k in _KEYS}, **options}
    )
    links = [common] * workers
    for key, own in _mapping("workers", content.get("workers", {})).items():
        for worker in _workers(key, workers):
            links[worker] = links[worker].with_options(_mapping(f"workers {key}", own))
    islands = tuple(tuple(_numbers(one, workers)) for one in _list(content, "islands"))
    between = LinkShape().with_options(_mapping("between", content.get("between", {})))
    if not islands and "between" in content:
        raise ConfigError("links: between needs islands")
    changes = (_change(_mapping("changes", one), workers) for one in _list(content, "changes"))
    ordered = tuple(sorted(changes, key=lambda change: change.at_s))
    return NetworkPlan(tuple(links), islands, between, ordered)


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"links: cannot read {path}: {error}") from error
    found = dict(_mapping(str(path), content))
    unknown = sorted(found.keys() - set(_FILE_KEYS))
    if unknown:
        raise ConfigError(f"links: {path}: unknown {unknown}, expected some of {[*_FILE_KEYS]}")
    return found


def _change(content: Mapping[str, object], workers: int) -> LinkChange:
    options = {key: value for key, value in content.items() if key not in ("at", "workers")}
    at_s = _latency("at", content.get("at"), -1.0)
    if at_s < 0 or not options:
        raise ConfigError(f"links: a change needs a time `at` and new settings, got {content!r}")
    chosen = content.get("workers", [*range(workers)])
    return LinkChange(at_s, options, tuple(_numbers(chosen, workers)))


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"links: {name} must be an object, got {value!r:.40}")
    return value


def _list(content: Mapping[str, object], key: str) -> Sequence[object]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"links: {key} must be a list, got {value!r:.40}")
    return value


def _workers(key: str, workers: int) -> list[int]:
    """Parses the workers of a key such as "2" or "2,3"."""
    words = key.split(",")
    return _numbers([int(word) if word.strip().isdigit() else word for word in words], workers)


def _numbers(value: object, workers: int) -> list[int]:
    found: list[int] = []
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < workers:
            raise ConfigError(f"links: workers are numbers from 0 to {workers - 1}, got {number!r}")
        found.append(number)
    return found


def _rate(name: str, value: object) -> int | None:
    """Returns the bits per second; None, or the text none, is no limit."""
    if value is None or value == "none":
        return None
    if not isinstance(value, str):
        raise ConfigError(f"links: {name} must be a text such as '100mbit', got {value!r}")
    return parse_rate(value)


def _latency(name: str, value: object, before: float) -> float:
    if value is None:
        return before
    if not isinstance(value, str):
        raise ConfigError(f"links: {name} must be a text such as '20ms', got {value!r}")
    return parse_latency(value)


def _share(value: object, before: float) -> float:
    """Returns a share that is a number, or a text such as "0.1%" or "0.001"."""
    if value is None:
        return before
    text = str(value).strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f"loss: expected a share such as 0.1% or 0.001, got {value!r}") from None
