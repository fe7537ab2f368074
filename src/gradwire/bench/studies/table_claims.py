"""Claims of the studies that repeat papers' tables: the records choose the word of the verdict."""

from collections.abc import Callable, Mapping, Sequence

from gradwire.bench import human
from gradwire.bench.report.study_facts import Facts
from gradwire.bench.studies.cases import cser, qsparse
from gradwire.bench.studies.claim import Claim
from gradwire.bench.studies.paper_tables import GRAVAC_TABLES, PAPER_TABLES
from gradwire.bench.studies.study import Study

Verdict = Callable[[Facts], str]

_METHODS = ("topk", "dgc", "redsync", "randomk")
_CLOSE = 0.01
"""A relative difference from dense quality that counts as none."""
_VOLUME = 19
"""The least saving that the authors print at dense accuracy, in floats."""


def under(study: Study, method: str, rule: str) -> str:
    """Returns the study's case of a method under a controller."""
    wanted = f"{method}:ratio=0.1 @ controller=({rule}:"
    found = [c for c in study.cases if c.startswith(wanted) and "epsilon=" not in c]
    assert len(found) == 1, f"{wanted} is in {len(found)} cases"
    return found[0]


def loss_of_quality(facts: Facts, spec: str) -> float:
    """Returns how much worse than dense a case ends, relative to dense; negative if better."""
    dense, own = facts.metric(), facts.metric(spec)
    lower = facts.runs(spec)[0].metric_better == "lower"
    return (own - dense if lower else dense - own) / dense


def _best_saving(facts: Facts, specs: Sequence[str]) -> str | None:
    """Returns the case with the fewest bytes of those as good as dense, or None."""
    good = [spec for spec in specs if loss_of_quality(facts, spec) <= _CLOSE]
    return max(good, key=facts.ratio, default=None)


def _gravac(name: str) -> Verdict:
    study = PAPER_TABLES[name]
    methods = [m for m in _METHODS if f"{m}:ratio=0.1" in study.cases]

    def verdict(facts: Facts) -> str:
        words = []
        for rule, title in (
            ("gravac-paper", "the printed gain and an epsilon of 0.7"),
            ("gravac", "the calibrated one"),
        ):
            specs = [under(study, method, rule) for method in methods]
            best = _best_saving(facts, specs)
            ends = ", ".join(
                f"{method} {facts.end(spec)} ({human.times(facts.ratio(spec))})"
                for method, spec in zip(methods, specs, strict=True)
            )
            enough = best is not None and facts.ratio(best) >= _VOLUME
            words.append(f"**{'Reproduced' if enough else 'Refuted'}** with {title}: {ends}.")
        return (
            f"{' '.join(words)} Dense ends at {facts.end()}, static top-k 10x at "
            f"{facts.end('topk:ratio=0.1')}, 1000x at {facts.end('topk:ratio=0.001')}. In "
            "brackets: times fewer bytes."
        )

    return verdict


def _feedback_rates(facts: Facts) -> str:
    parts, holds = [], True
    for name, spec in (("random-k", "randomk:ratio=0.01"), ("top-k", "topk:ratio=0.01")):
        without = f"{spec} @ memory=none"
        holds &= facts.metric(spec) > facts.metric(without)
        parts.append(f"{name} 1 % {facts.end(spec)} with, {facts.end(without)} without")
    word = "Reproduced" if holds else "Refuted"
    return (
        f"**{word}, each at its best of four learning rates**: {'; '.join(parts)}; dense "
        f"{facts.end()}."
    )


def _qsparse_async(facts: Facts) -> str:
    prefix = "topk:ratio=0.01 | qsgd:bits=4 @ local="
    sync, rare = qsparse(0.01, 8), f"{prefix}(async_qsparse:sync_every=8,gaps=random)"
    close = loss_of_quality(facts, rare) <= loss_of_quality(facts, sync) + _CLOSE
    return (
        f"**{'Reproduced' if close else 'Refuted'}.** Gaps of 1 to 8 steps, each worker's own, end "
        f"at {facts.end(rare)} with {facts.fewer(rare)} fewer bytes; common syncs every 8 steps at "
        f"{facts.end(sync)} with {facts.fewer(sync)}; dense at {facts.end()}."
    )


def _qsparse_ptb(facts: Facts) -> str:
    spec = qsparse(0.01, 8)
    close = loss_of_quality(facts, spec) <= _CLOSE
    return (
        f"**{'Reproduced' if close else 'Refuted in five epochs'}.** 1 % in 4 bits every 8 steps "
        f"ends at {facts.end(spec)} with {facts.fewer(spec)} fewer bytes, top-k 1 % at every step "
        f"at {facts.end('topk:ratio=0.01')}; dense at {facts.end()}. {_qsparse_async(facts)}"
    )


def _cser(facts: Facts) -> str:
    parts, holds = [], True
    for ratio, cases in (
        (16, cser(updates=32, errors=4, sync_every=8, qsparse=2)),
        (256, cser(updates=512, errors=16, sync_every=32, qsparse=32)),
        (1024, cser(updates=2048, errors=8, sync_every=256, qsparse=128)),
    ):
        own, feedback, local = cases
        holds &= facts.metric(own) > max(facts.metric(feedback), facts.metric(local))
        parts.append(
            f"at {ratio} CSER {facts.end(own)}, Qsparse {facts.end(local)}, error feedback "
            f"{facts.end(feedback)}"
        )
    word = "The order is reproduced" if holds else "The order is refuted"
    return f"**{word}**, each at its best learning rate: {'; '.join(parts)}; dense {facts.end()}."


def _is_open(facts: Facts) -> bool:
    """Returns True: the records choose the words of the verdict, so they cannot contradict it."""
    return True


_SERVER = (
    "Of asynchronous runs the time is that of one worker's bytes; the server's link, which carries "
    "the messages of all, is not timed."
)
_SMALL = "A narrower model, a shorter run and windows of a tenth of it, not 500 steps."
_COUNT = (
    "The authors count floats of one worker's message; bytes here are those that a worker sends, "
    "and workers that gather send one copy for each of the others."
)
_GRAVAC_CLAIM = (
    "GraVAC ends at dense quality with 13 to 289 times fewer floats, faster than top-k 10x "
    "(Tyagi and Swany 2023)."
)

TABLE_CLAIMS: Mapping[str, Claim] = {
    **{
        name: Claim(
            f"GraVAC's table: {PAPER_TABLES[name].summary.partition(', on ')[2]}",
            _GRAVAC_CLAIM,
            _gravac(name),
            _is_open,
            (_SMALL, _COUNT),
        )
        for name in GRAVAC_TABLES
    },
    "gravac-32": Claim(
        "GraVAC with 32 workers", _GRAVAC_CLAIM, _gravac("gravac-32"), _is_open, (_SMALL, _COUNT)
    ),
    "qsparse-ptb": Claim(
        "Qsparse-local-SGD on Penn Treebank",
        "Quantised, sparsified local steps keep dense quality (Basu et al. 2019).",
        _qsparse_ptb,
        _is_open,
        (_SERVER,),
    ),
    "qsparse-async": Claim(
        "Asynchronous Qsparse-local-SGD",
        "Syncs at each worker's own times cost no accuracy (Basu et al. 2019).",
        _qsparse_async,
        _is_open,
        (_SERVER, "Workers advance at one speed, so a model is stale by at most a gap of 8 steps."),
    ),
    "cser-cifar100": Claim(
        "CSER on CIFAR-100",
        "CSER loses nothing at ratios of 16 to 1024 and is about ten times as fast (Xie et al. "
        "2020).",
        _cser,
        _is_open,
        ("Eight epochs instead of 200, on a grid of four learning rates.",),
    ),
    "error-feedback-rates": Claim(
        "Error feedback over learning rates",
        "Error feedback is better than none for random-k and top-k.",
        _feedback_rates,
        _is_open,
    ),
}
