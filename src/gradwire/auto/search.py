"""The search of the automatic mode: calibrate, time, explore, settle, review, follow.

It sees only numbers that all ranks agree on, so all ranks decide the same. Candidates are
calibrated on samples of the gradients while training is uncompressed. Those that the risk budget
admits and that are predicted to be fast then take a few real steps each, and the two fastest some
more; the faster one stays, until the link changes or its risk does, or until another one turns out
to be faster: a few steps may mislead, and are repeated later, at growing intervals.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from gradwire.auto.calibration import SAMPLED_STEPS, Calibration
from gradwire.auto.link_watch import REFERENCE_STEPS, LinkWatch
from gradwire.auto.step_model import link_at
from gradwire.auto.table import WORTH, Table
from gradwire.comm.cost_model import LinkModel
from gradwire.control.base import DecisionLog
from gradwire.control.timing import StepTiming

Phase: TypeAlias = Literal["calibrate", "time", "explore", "settled", "review"]

CALIBRATED_PER_STEP = 12
TIMED_STEPS = 6
"""Uncompressed steps after the calibration, of which the first one is not timed."""


class Round(NamedTuple):
    """One round of the exploration: the fastest candidates so far are timed anew."""

    candidates: int
    steps: int
    """Real steps of each candidate, of which the first one is not timed."""


ROUNDS = (Round(5, 4), Round(2, 7))
"""Most candidates are out after a few steps; the steps that are left go to the two fastest."""
WARM_UP_TIMINGS = 1
"""Timings of a candidate's first round that its second one drops."""
SETTLED_INTERVAL = 4
"""One step in this many reports the timing of uncompressed gradients."""
SUSPICIOUS_INTERVAL = 2
"""The interval while the last timing is that of another link: every step between is timed."""
CLEARLY = 1.3
"""A candidate that is faster than the next by this factor needs no second round."""
FOLLOW = 1.1
"""After a change of the link another method replaces the current one from this speedup on."""
REVIEW_AFTER = 24
"""Timings of the settled candidate before the first review; the interval doubles with each."""
KEPT_TIMINGS = 48
"""The newest timings of the settled candidate, whose median is its step time in a review."""
REVIEW_STEPS, WARM_UP_STEPS = 10, 3
"""Steps that a candidate is timed again for, and those at their start that do not count."""
EARLY_MOVES = 2
"""Times that the search begins again for another link before it has settled, at most."""
ADAPTIVE_ADVICE = (
    "; sparse gradients stall adaptive optimisers such as Adam: gradwire.optim compresses their "
    "updates instead"
)
"""Ends the log line unless the optimiser is known not to be adaptive."""


class StepFacts(NamedTuple):
    """Measurements of a step that all ranks share."""

    step: int
    """Number of completed steps, this one included."""
    timing: StepTiming | None
    """The timing of earlier steps, the mean over ranks."""
    timed: int | None
    """The candidate that was timed, and sampled."""
    calibrations: Mapping[int, Sequence[Calibration]]
    """The calibrations of candidates, one for each group of parameters."""
    sampled: Sequence[tuple[float, float]] | None
    """Sums of squares of the error and of the input of an earlier step, if it was sampled, of each
    group."""
    took_current: bool
    """False if the step did not use the current candidate: it sent the residual of another."""


class Search:
    """The phase and the current candidate; the table has what is known of all candidates."""

    def __init__(self, table: Table, start: int) -> None:
        self.table = table
        self.log = DecisionLog()
        self.phase: Phase = "calibrate"
        self.current = start
        self.settled_at: int | None = None
        self._calibrated = 0
        self._computed_s: list[float] = []
        self._age = 0
        """Steps that the current candidate has taken."""
        self._round = 0
        self._queue: list[int] = []
        """Candidates of this round that are still to be timed."""
        self._watch = self._new_watch()
        self._slow = self._moves = 0
        """Timings in a row that were those of a slower link, and changes of it before a choice."""
        self._expected_s: float | None = None
        """Predicted step of the current candidate when its steps began, unless it is the first."""
        self._settled_s: list[float] = []
        """The newest step times of the current candidate since the search settled on it."""
        self._unreviewed, self._review_after = 0, REVIEW_AFTER
        """Timings since the last review, and those until the next."""
        self._reviewed: int | None = None
        """The candidate that another one is compared with."""
        self.log.add(0, self.spec, f"to measure; the link: {table.link.describe()}")

    @property
    def spec(self) -> str:
        return self.table.options[self.current].spec

    def to_calibrate(self) -> range:
        """Returns the candidates to calibrate after this step."""
        if self.phase != "calibrate" or self._age < SAMPLED_STEPS:
            return range(0)
        last = min(self._calibrated + CALIBRATED_PER_STEP, self.table.singles)
        return range(self._calibrated, last)

    def end_step(self, facts: StepFacts) -> None:
        """Takes in the facts of a step, and may choose another candidate for the next."""
        for index, calibration in facts.calibrations.items():
            self.table.add_calibration(index, calibration)
            self._calibrated = max(self._calibrated, index + 1)
        self._age += facts.took_current
        if facts.timed is not None and facts.timing is not None:
            if self.phase != "settled" and facts.timed == self.current:
                self._follow_early(facts.step, facts.timing)
            self._add_timing(facts.timed, facts.timing)
        if facts.timed == self.current and facts.sampled is not None:
            self._rate_again(facts.step, facts.sampled)
        if facts.took_current:
            self._advance(facts.step)

    @property
    def is_quiet(self) -> bool:
        """True if the next step of uncompressed gradients sends no statistics.

        Then it takes the short path of plain means, whose time counts: one step in some reports
        the timings of the others.
        """
        option = self.table.options[self.current]
        may_vary = option.plan.is_dense or (option.is_uncompressed and not self.table.replays)
        if self.phase == "calibrate" or not may_vary:
            return False
        interval = SETTLED_INTERVAL
        if self.phase in ("time", "explore"):
            interval = self._steps
        elif self.phase == "settled" and self._watch.is_suspicious:
            interval = SUSPICIOUS_INTERVAL
        return self._age % interval != interval - 1

    def _is_uncompressed(self) -> bool:
        return self.table.options[self.current].is_uncompressed

    def _new_watch(self) -> LinkWatch:
        # Uncompressed steps report rarely.
        steps = 2 if self._is_uncompressed() else REFERENCE_STEPS
        return LinkWatch(steps, self.table.rows[self.current].expected_s())

    def _add_timing(self, index: int, timing: StepTiming) -> None:
        if self.phase == "time":
            self._computed_s.append(self.table.computation_s(index, timing))
        if self.phase == "settled":
            if index == self.current:
                self._watch.add(timing)
                self._settled_s = [*self._settled_s, timing.step_s][-KEPT_TIMINGS:]
                self._unreviewed += 1
        elif self.phase != "review" or (index == self.current and self._age > WARM_UP_STEPS):
            self.table.add_timing(index, timing)

    def _rate_again(self, step: int, sampled: Sequence[tuple[float, float]]) -> None:
        """Rates the current candidate by the error of a real step."""
        table = self.table
        if self._is_uncompressed():
            return
        table.rate(self.current, sampled)
        row = table.rows[self.current]
        if self.phase == "settled" and not table.is_admitted(self.current):
            reason = f"the risk of {self.spec} has become {row.level} ({row.why})"
            self._settle(step, table.best_predicted(), reason)

    def _advance(self, step: int) -> None:
        if self.phase == "calibrate":
            if self._calibrated == self.table.singles:
                self.phase, self._age = "time", 0
        elif self.phase == "time":
            if self._age >= TIMED_STEPS and self._computed_s:
                self.table.compute_s = median(self._computed_s)
                if self.current < self.table.singles:
                    self.table.mix()
                self._explore(self.current)
                self._next_candidate(step)
        elif self.phase == "settled":
            self._follow(step)
            if self.phase == "settled" and self._unreviewed >= self._review_after:
                self._review(step)
        elif self.phase == "review":
            if self._age > REVIEW_STEPS:
                self._end_review(step)
        # The timing of the last candidate's last step arrives one step later.
        elif self._age >= self._steps + (not self._queue):
            self._next_candidate(step)

    @property
    def _steps(self) -> int:
        """The steps of the current candidate in this phase."""
        return TIMED_STEPS if self.phase == "time" else ROUNDS[self._round].steps

    def _explore(self, known: int | None) -> None:
        """Begins to time candidates, but for one that is known."""
        self.phase, self._round, self._slow = "explore", 0, 0
        self._queue = self.table.promising(ROUNDS[0].candidates, known)

    def _next_candidate(self, step: int) -> None:
        table = self.table
        if not self._queue:
            self._round += 1
            self._queue = self._contenders()
        if not self._queue:
            self._settle_on_fastest(step)
            return
        self.current, self._age, self._slow = self._queue.pop(0), 0, 0
        self._expected_s = table.predicted_s(self.current)
        if self._round:
            row = table.rows[self.current]
            row.times_s = row.times_s[WARM_UP_TIMINGS:]
        self.log.add(step, self.spec, f"to time it: {self._expected_s * 1e3:.3g} ms predicted")

    def _contenders(self) -> list[int]:
        """Returns the candidates of the next round; none if one is clearly the fastest."""
        if self._round >= len(ROUNDS):
            return []
        found = self.table.measured()[: ROUNDS[self._round].candidates]
        bound_s = CLEARLY * self.table.expected_s(found[0])
        close = [index for index in found if self.table.expected_s(index) < bound_s]
        # The current one first, to change less often.
        return sorted(close, key=lambda i: i != self.current) if len(close) > 1 else []

    def _settle_on_fastest(self, step: int) -> None:
        """Settles by measured steps; without a gain of 5 % nothing is compressed."""
        table = self.table
        best, plain = table.fastest(), table.baseline()
        gain = table.expected_s(plain) / table.expected_s(best)
        name = table.options[plain].spec
        if best == plain or gain < WORTH:
            text = f"no admitted method gains {WORTH - 1:.0%} over {name}"
            if table.options[plain].plan.is_dense:
                text += ": do not compress here"
            self._settle(step, plain, text)
            return
        reason = f"{table.expected_s(best) * 1e3:.3g} ms a step, {gain:.2f} times as fast as {name}"
        self._settle(step, best, reason)

    def _review(self, step: int) -> None:
        """Times another candidate again if it may be faster than the current one is by now."""
        table, current = self.table, self.current
        table.rows[current].times_s = list(self._settled_s)
        self._unreviewed, self._review_after = 0, 2 * self._review_after
        challenger = table.challenger(current)
        if challenger is None:
            return
        row = table.rows[challenger]
        row.retries, row.times_s = row.retries + 1, []
        self.phase, self._reviewed = "review", current
        self.current, self._age = challenger, 0
        self._expected_s = table.predicted_s(challenger)
        now_ms = table.expected_s(current) * 1e3
        self.log.add(step, self.spec, f"to time it again: {now_ms:.3g} ms with the current method")

    def _end_review(self, step: int) -> None:
        """Settles on the faster of two; a difference within the noise changes nothing."""
        table, challenger, before = self.table, self.current, self._reviewed
        assert before is not None
        new_s, old_s = table.expected_s(challenger), table.expected_s(before)
        if table.is_admitted(challenger) and old_s >= WORTH * new_s:
            name = table.options[before].spec
            reason = f"{new_s * 1e3:.3g} ms a step, {old_s / new_s:.2f} times as fast as {name}"
            self._settle(step, challenger, reason)
            return
        self._stay_with(before)
        self.log.add(step, self.spec, f"stays: {new_s * 1e3:.3g} instead of {old_s * 1e3:.3g} ms")

    def _stay_with(self, index: int) -> None:
        self.current, self.phase, self._age, self._queue = index, "settled", 0, []
        self._watch, self._reviewed = self._new_watch(), None
        self._slow = self._moves = 0
        self._settled_s, self._unreviewed = [], 0

    def _settle(self, step: int, index: int, reason: str) -> None:
        row = self.table.rows[index]
        self._stay_with(index)
        self.settled_at = step if self.settled_at is None else self.settled_at
        link = self.table.link.describe()
        risk = f"risk {row.level} ({row.why})"
        advice = ADAPTIVE_ADVICE if self.table.adaptive else ""
        self.log.add(step, self.spec, f"settled: {reason}; {risk}; the link: {link}{advice}")

    def _follow(self, step: int) -> None:
        """Chooses again, from the table, if the link has changed."""
        wire_s = self._watch.changed_wire_s()
        if wire_s is not None:
            self._settle_on_link(step, wire_s)

    def _settle_on_link(self, step: int, wire_s: float) -> None:
        """Chooses from the predictions for the link on which the exchange took this time."""
        table = self.table
        old = self._move_to(wire_s)
        if old is None:
            return
        self._review_after = REVIEW_AFTER
        best = table.best_predicted()
        now_s, best_s = table.predicted_s(self.current), table.predicted_s(best)
        if now_s < FOLLOW * best_s:
            best, best_s = self.current, now_s
        change = "" if best == self.current else f" instead of {now_s * 1e3:.3g} ms"
        if best == self.current:
            # The link may still be falling.
            table.rows[best].wire_s = wire_s
        reason = f"the link was {old.describe()}: {best_s * 1e3:.3g} ms predicted{change}"
        self._settle(step, best, reason)

    def _move_to(self, wire_s: float) -> LinkModel | None:
        """Takes the link of this wire time; returns the old one, or None if there is no load."""
        table, load = self.table, self.table.rows[self.current].load
        if load is None:
            return None
        old = table.link
        table.move_to(link_at(wire_s, load, old, table.buckets), self.current)
        return old

    def _follow_early(self, step: int, timing: StepTiming) -> None:
        """Explores again, or chooses again in a review, if the link falls before a choice."""
        table = self.table
        has_fallen = table.has_fallen(self.current, timing, self._expected_s)
        self._slow = self._slow + 1 if has_fallen else 0
        # A timing of uncompressed steps is that of several.
        if self._slow < (1 if self._is_uncompressed() else 2) or self._moves >= EARLY_MOVES:
            return
        self._slow, self._moves = 0, self._moves + 1
        if self.phase == "review":
            self._settle_on_link(step, timing.wire_s)
            return
        old = self._move_to(timing.wire_s)
        if old is None:
            return
        self.log.add(step, self.spec, f"to measure on; the link was {old.describe()}")
        if self.phase == "explore":
            table.rows[self.current].times_s = []
            self._explore(None)
            self._next_candidate(step)

    def restart(self, step: int) -> None:
        """Searches again from the current candidate: earlier measurements no longer hold."""
        self.table.clear()
        self.phase, self.settled_at, self._calibrated = "calibrate", None, 0
        self._computed_s, self._queue = [], []
        self._age, self._watch = 0, self._new_watch()
        self._slow, self._moves, self._expected_s = 0, 0, None
        self._settled_s, self._reviewed = [], None
        self._unreviewed, self._review_after = 0, REVIEW_AFTER
        self.log.add(step, self.spec, "to measure again")

    def describe(self) -> dict[str, object]:
        """Returns choice, link and table, for `stats()`."""
        return {
            "setting": self.spec,
            "phase": self.phase,
            "settled_at": self.settled_at,
            "link": self.table.link.describe(),
            "compute_ms": self.table.compute_s * 1e3,
            "adaptive": self.table.adaptive,
            "candidates": self.table.describe(),
        }

    def state_dict(self) -> dict[str, object]:
        watch = self._watch
        return {
            "table": self.table.state_dict(),
            "phase": self.phase,
            "current": self.spec,
            "settled_at": self.settled_at,
            "calibrated": self._calibrated,
            "computed_s": list(self._computed_s),
            "age": self._age,
            "round": self._round,
            "queue": list(self._queue),
            "slow": self._slow,
            "moves": self._moves,
            "predicted_s": self._expected_s,
            "expected_s": None if watch.expected_s is None else list(watch.expected_s),
            "reference_s": None if watch.reference_s is None else list(watch.reference_s),
            "recent": [list(timing) for timing in watch.recent],
            "settled_s": list(self._settled_s),
            "unreviewed": self._unreviewed,
            "review_after": self._review_after,
            "reviewed": self._reviewed,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved["phase"] not in get_args(Phase):
            raise ValueError(f"no phase {saved['phase']!r}")
        self.table.load_state_dict(saved["table"])
        self.phase, self.settled_at = saved["phase"], saved["settled_at"]
        self.current = self.index_of(saved["current"])
        self._calibrated, self._computed_s = saved["calibrated"], list(saved["computed_s"])
        self._age, self._queue = saved["age"], list(saved["queue"])
        self._round = saved["round"]
        self._watch = self._new_watch()
        self._slow, self._moves = saved["slow"], saved["moves"]
        self._expected_s = saved["predicted_s"]
        self._watch.expected_s = _pair(saved["expected_s"])
        self._watch.reference_s = _pair(saved["reference_s"])
        self._watch.recent = [StepTiming(*numbers) for numbers in saved["recent"]]
        self._settled_s, self._reviewed = list(saved["settled_s"]), saved["reviewed"]
        self._unreviewed, self._review_after = saved["unreviewed"], saved["review_after"]

    def index_of(self, spec: str) -> int:
        """Returns the candidate of a saved state; raises ValueError if there is none."""
        return [option.spec for option in self.table.options].index(spec)


def _pair(saved: list[float] | None) -> tuple[float, float] | None:
    return None if saved is None else (saved[0], saved[1])
