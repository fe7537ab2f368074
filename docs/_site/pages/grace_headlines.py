"""The headlines of GRACE's evaluation (Xu et al. 2021), each decided by the records of a study."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.bench.report.study_facts import Facts
from gradwire.bench.studies.grace import GRACE_METHODS

FAST, SLOW = "10gbit", "1gbit"
SPARSE = ("Random-k", "Top-k", "Threshold-v", "DGC", "Adaptive")
_POWERSGD, _QSGD = GRACE_METHODS["PowerSGD"], GRACE_METHODS["QSGD"]


class Decision(NamedTuple):
    holds: bool
    figure: str


@dataclass(frozen=True)
class Headline:
    """A published result; `decide` compares it with ours, or there is no comparable run."""

    published: str
    study: str | None
    decide: Callable[[Facts], Decision] | None = None
    why_not: str = ""


def _faster(facts: Facts, rate: str, least: float = 1.0) -> Sequence[str]:
    """Returns GRACE's names of the methods that are faster than dense by more than a factor."""
    return [n for n, spec in GRACE_METHODS.items() if facts.speed(spec, rate=rate) > least]


def _none_is_faster(facts: Facts) -> Decision:
    found = _faster(facts, FAST)
    names = f": {', '.join(found)}" if found else ""
    return Decision(not found, f"{len(found)} of 16 are faster at 10 Gbit/s{names}")


def _most_gain_at_1gbit(facts: Facts) -> Decision:
    found = _faster(facts, SLOW, 1.1)
    return Decision(len(found) >= 13, f"{len(found)} of 16 gain more than 10 % at 1 Gbit/s")


def _powersgd_on_lstm(facts: Facts) -> Decision:
    ratio = facts.metric(_POWERSGD) / facts.metric()
    figure = (
        f"{facts.faster(_POWERSGD, rate=FAST)}; perplexity {facts.end(_POWERSGD)}, dense "
        f"{facts.end()}"
    )
    return Decision(facts.speed(_POWERSGD, rate=FAST) > 1.5 and ratio > 1.2, figure)


def _sparsifiers_cost_hit_rate(facts: Facts) -> Decision:
    ends = {name: facts.metric(GRACE_METHODS[name]) for name in SPARSE}
    best, worst = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    figure = (
        f"dense {facts.end()}; {best} {facts.end(GRACE_METHODS[best])}, {worst} "
        f"{facts.end(GRACE_METHODS[worst])}"
    )
    return Decision(ends[best] < facts.metric() - 0.05, figure)


def _gain_on_ncf(facts: Facts) -> Decision:
    names = ("Threshold-v", "PowerSGD", "DGC")
    speeds = [facts.speed(GRACE_METHODS[name], rate=FAST) for name in names]
    figure = ", ".join(f"{n} {facts.faster(GRACE_METHODS[n], rate=FAST)}" for n in names)
    return Decision(min(speeds) > 2, figure)


def _signs_fail(facts: Facts) -> Decision:
    specs = [GRACE_METHODS[name] for name in ("SignSGD", "SIGNUM")]
    figure = f"{facts.end(specs[0])} and {facts.end(specs[1])}, dense {facts.end()}"
    return Decision(all(facts.metric(s) < facts.metric() - 0.04 for s in specs), figure)


def _top_k_on_unet(facts: Facts) -> Decision:
    spec = GRACE_METHODS["Top-k"]
    figure = f"top-k 1 % {facts.end(spec)}, dense {facts.end()}"
    return Decision(facts.metric(spec) > facts.metric() - 0.01, figure)


def _feedback(*pairs: str) -> Callable[[Facts], Decision]:
    """Returns a decision that holds if error feedback lifts the accuracy of every method."""

    def decide(facts: Facts) -> Decision:
        gains = [facts.metric(s) - facts.metric(f"{s} @ memory=none") for s in pairs]
        figure = "; ".join(f"{facts.end(f'{s} @ memory=none')} to {facts.end(s)}" for s in pairs)
        return Decision(all(gain > 0 for gain in gains), figure)

    return decide


def _breaks_qsgd(facts: Facts) -> Decision:
    with_it, without = f"{_QSGD} @ memory=residual", _QSGD
    figure = f"{facts.end(without)} to {facts.end(with_it)}"
    return Decision(facts.metric(with_it) < facts.metric(without) - 0.1, figure)


HEADLINES = (
    Headline(
        "ResNet-50, 10 and 25 Gbit/s: only Random-k is faster than no compression (1.35 and 1.26 "
        "times)",
        None,
        why_not="ImageNet was not run",
    ),
    Headline(
        "Small CNNs at 10 Gbit/s: no method is faster than no compression (ResNet-20: 0.06 to "
        "0.90 times)",
        "grace-resnet20",
        _none_is_faster,
    ),
    Headline(
        "1 Gbit/s: thirteen methods gain more than 10 % (ResNet-50)",
        "grace-resnet9",
        _most_gain_at_1gbit,
    ),
    Headline(
        "LSTM at 10 Gbit/s: PowerSGD is 2.68 times as fast, at a perplexity of 148 for 100",
        "grace-lstm",
        _powersgd_on_lstm,
    ),
    Headline(
        "NCF at 10 Gbit/s: Threshold-v 4.52, PowerSGD 4.44, DGC 3.34 times as fast",
        "grace-neumf",
        _gain_on_ncf,
    ),
    Headline(
        "NCF: every sparsifier at 1 % costs 12 points of hit rate (83 for 95 %)",
        "grace-neumf",
        _sparsifiers_cost_hit_rate,
    ),
    Headline(
        "ResNet-20: SignSGD and SIGNUM fail (63.3 and 84.8 for 91.0 %)",
        "grace-resnet20",
        _signs_fail,
    ),
    Headline("U-Net: top-k 1 % loses nothing (98.2 for 96.4 %)", "grace-unet", _top_k_on_unet),
    Headline(
        "Error feedback lifts top-k 1 % from 42.5 to 73.0 % (ResNet-50)",
        "error-feedback",
        _feedback("topk:ratio=0.01"),
    ),
    Headline(
        "Error feedback lifts random-k 1 % from 39.2 to 75.0 % (ResNet-50)",
        "error-feedback",
        _feedback("randomk:ratio=0.01"),
    ),
    Headline(
        "Error feedback lifts adaptive 1 % from 22.9 to 72.0 % and Threshold-v from 0.2 to 73.2 %",
        "error-feedback",
        _feedback("adaq:ratio=0.01", "threshold:value=0.01"),
    ),
    Headline("Error feedback breaks QSGD (0 for 66 to 72 %)", "error-feedback", _breaks_qsgd),
    Headline(
        "Error feedback breaks TernGrad (44.8 for 62.4 %)",
        None,
        why_not="it is no contraction, and memory=residual refuses it with a ConfigError",
    ),
    Headline(
        "VGG-19, 10 Gbit/s: PowerSGD 5.60, DGC 4.87 times as fast",
        None,
        why_not="VGG-19 was not run; grace-vgg16 is a quarter of its size",
    ),
)
"""Published figures: 8 workers, one V100 each, Horovod over MPI."""
