"""What Autopilot does and why, in words."""

from collections import Counter
from collections.abc import Mapping, Sequence

from laconic.control.chart import Spot
from laconic.control.costs import Link
from laconic.control.ladder import Rung
from laconic.network.rate import format_rate


def mixture(places: Mapping[str, int], rungs: Sequence[Rung]) -> str:
    """The setting of all layers, or each one with how many have it."""
    counts = sorted(Counter(places.values()).items())
    if len(counts) == 1:
        return rungs[counts[0][0]].words()
    return ", ".join(f"{rungs[place].words()} ({count})" for place, count in counts) or "nothing"


def moves(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """How many layers say less now, and how many more."""
    less = sum(new[name] > place for name, place in old.items())
    more = sum(new[name] < place for name, place in old.items())
    said = [f"{n} say {what}" for n, what in ((less, "less"), (more, "more")) if n]
    return f"of {len(old)} layers {' and '.join(said)}"


def reason(old: Spot, new: Spot, safe: bool, link: Link) -> str:
    """What is gained; where too little of the old arrives, that first."""
    rate_bits = round(float(f"{8 / max(link.byte_s, 1e-12):.3g}"))
    now, then = (f"{s.step_s * 1e3:.3g} ms a step worth {s.worth:.2g}" for s in (old, new))
    why = f"{then} instead of {now}; the link carries {format_rate(max(rate_bits, 1))}"
    return why if safe else f"too little arrives: {why}"
