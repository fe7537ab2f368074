"""The table of candidates: cost, risk, and predicted and measured step times of each.

It holds numbers that all ranks agree on, so all ranks read the same from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradwire.auto.accuracy_risk import LEVELS, Level, Risk, assess_risk
from gradwire.auto.auto import Auto
from gradwire.auto.calibration import Calibration
from gradwire.auto.candidates import is_admitted
from gradwire.auto.mixing import MIXED_WORTH, allocate, total_load
from gradwire.auto.plans import Plans, choice_of
from gradwire.auto.rows import Row, row_of
from gradwire.auto.step_model import StepModel, solve_compute_s
from gradwire.comm.cost_model import LinkModel
from gradwire.control.timing import StepTiming
from gradwire.engine.plan import Plan

WORTH = 1.05
"""The smallest speedup that is worth compression."""
PROMISING = 1.5
"""Candidates predicted to take longer than this multiple of the fastest are not explored."""
RETRIES = 2
"""Times that a candidate is timed again, at most."""
EQUAL_WITHIN = 1.03
"""Within this factor of the fastest the lower risk decides: timings are no more accurate."""


FALLEN = 4.0
"""Factor of the predicted step from which a link counts as slower before the search settles."""


class Table:
    """Candidates with their rows, and the link and computation that predictions are made for."""

    def __init__(
        self,
        config: Auto,
        plans: Plans,
        link: LinkModel,
        overlaps: bool,
        replays: bool = False,
    ) -> None:
        """`replays`: steps are replayed as CUDA graphs, so that their messages must be alike."""
        self.config, self.plans = config, plans
        self.overlaps, self.replays = overlaps, replays
        self.link = self.timed_link = link
        """The link now, and the link on which the measured steps were taken."""
        self.options = plans.singles(link)
        """Methods for all parameters; the last one may mix methods of groups."""
        self.singles = len(self.options)
        self.rows = [Row() for _ in self.options]
        self.compute_s, self.buckets = 0.0, 1

    @property
    def adaptive(self) -> bool:
        return self.plans.adaptive

    def clear(self) -> None:
        """Forgets all measurements but those of the link."""
        self.rows = [Row() for _ in self.options]
        self.compute_s, self.timed_link = 0.0, self.link

    def add_calibration(self, index: int, found: Sequence[Calibration]) -> None:
        """Takes the calibrations of a candidate, one for each group."""
        self.rows[index].groups = list(found)
        self._sum_up(index)

    def _sum_up(self, index: int) -> None:
        """Takes load and rating of a candidate from those of its groups."""
        row = self.rows[index]
        row.load = total_load(self.options[index], row.groups)
        self.rate(index, [(part.error, part.total) for part in row.groups])

    def rate(self, index: int, errors: Sequence[tuple[float, float]]) -> None:
        """Rates a candidate by sums of squares of what it did not send, and of what it should.

        They are those of each group. A mixed candidate is rated as the worst of its groups.
        """
        row, option = self.rows[index], self.options[index]
        error, total = (sum(column) for column in zip(*errors, strict=True))
        if not (math.isfinite(error) and math.isfinite(total) and total > 0):
            # A zero gradient shows nothing; where everything is sent there is nothing to show.
            row.level = "none" if option.plan.is_dense else "high"
            row.why = "no gradient to measure"
            return
        row.error = math.sqrt(max(0.0, error) / total)
        risks = [self.risk(option.plan, error, total)]
        if option.is_mixed:
            pairs = zip(option.plans, errors, strict=True)
            parts = [(plan, *pair) for plan, pair in pairs if pair[1] > 0]
            risks = [self.risk(*part) for part in parts]
        worst = max(risks, key=lambda risk: LEVELS.index(risk.level))
        row.level, row.why = worst.level, worst.why

    def risk(self, plan: Plan, error: float, total: float) -> Risk:
        """Rates a method by sums of squares."""
        relative = math.sqrt(max(0.0, error) / total)
        return assess_risk(plan, relative, self.plans.size, self.adaptive)

    def add_timing(self, index: int, timing: StepTiming) -> None:
        row = self.rows[index]
        row.times_s.append(timing.step_s)
        row.wire_s = timing.wire_s
        if row.load is not None and timing.sent_bytes > 0:
            row.load = replace(row.load, link_bytes=timing.sent_bytes)

    def has_fallen(self, index: int, timing: StepTiming, expected_s: float | None) -> bool:
        """Returns whether a step took so long that the link must have become much slower.

        Before a method has settled there is little to compare with: the step that is `expected`,
        whose prediction must be wrong by more than it ever is on one link.
        """
        load = self.rows[index].load
        if load is None or timing.wire_s <= 0.5 * timing.step_s:
            return False
        if expected_s is not None:
            return timing.step_s > FALLEN * expected_s
        # On a GPU the host cannot see the wire time, so the first steps show nothing.
        is_seen = timing.exposed_s < timing.step_s
        return is_seen and timing.wire_s > FALLEN * load.wire_s(self.link, self.buckets)

    def computation_s(self, index: int, timing: StepTiming) -> float:
        """Returns the computation of a measured step: what training did not wait for.

        Where the host cannot see the exchange, it follows from the model of the step.
        """
        load = self.rows[index].load
        if timing.exposed_s >= timing.step_s and load is not None:
            return solve_compute_s(timing.step_s, load, self.link, self._model())
        return max(timing.step_s - timing.exposed_s, 0.1 * timing.step_s)

    def _model(self) -> StepModel:
        return StepModel(self.compute_s, self.buckets, self.overlaps)

    def predicted_s(self, index: int) -> float:
        """Returns the predicted step; of a measured candidate, with the error made there."""
        row = self.rows[index]
        if row.load is None:
            return math.inf
        predicted_s = self._model().step_s(row.load, self.link)
        if (measured_s := row.measured_s()) is not None:
            predicted_s += measured_s - self._model().step_s(row.load, self.timed_link)
        return max(predicted_s, 0.1 * self.compute_s)

    def expected_s(self, index: int) -> float:
        """Returns the measured step time, or the predicted one where none was measured."""
        return self.rows[index].measured_s() or self.predicted_s(index)

    def challenger(self, current: int) -> int | None:
        """Returns the candidate to time again: one that may be faster than the current one.

        The first steps after a change are slow, and a few steps of a busy machine are no sample: so
        the lower of prediction and measurement counts.
        """
        bound_s = self.expected_s(current) / WORTH
        others = [
            index
            for index in self.admitted()
            if index != current
            and self.rows[index].retries < RETRIES
            and self._hoped_s(index) < bound_s
        ]
        return min(others, key=self._hoped_s, default=None)

    def _hoped_s(self, index: int) -> float:
        return min(self.expected_s(index), self.modelled_s(index))

    def modelled_s(self, index: int) -> float:
        """Returns the step time of the model, whatever was measured."""
        load = self.rows[index].load
        return math.inf if load is None else self._model().step_s(load, self.link)

    def move_to(self, link: LinkModel, current: int) -> None:
        """Takes another link: measured times are corrected by the model, and may be tried again.

        Exchanges are chosen anew, and so are the methods of the groups, unless they are in use.
        """
        self.link = link
        for index, row in enumerate(self.rows):
            if row.times_s:
                row.times_s = [self.predicted_s(index)]
            row.wire_s, row.retries = None, 0
        self.timed_link = link
        for index in range(len(self.options)):
            self._choose_exchange(index)
        if current < self.singles:
            self.mix()

    def _choose_exchange(self, index: int) -> None:
        """Gives a candidate the exchange for the link, and its row the load of that."""
        old, row = self.options[index], self.rows[index]
        new = self.plans.renewed(old, self.link)
        if new.choice == old.choice:
            return
        self.options[index], row.times_s = new, []
        if row.groups:
            row.groups = [
                part._replace(hops=hops, link_bytes=link_bytes)
                for part, (hops, link_bytes) in zip(
                    row.groups, self.plans.link_loads(new), strict=True
                )
            ]
            row.load = total_load(new, row.groups)

    def mix(self) -> None:
        """Adds the candidate with a method for each group, if it may be worth it."""
        del self.options[self.singles :], self.rows[self.singles :]
        calibrated = self.rows[: self.singles]
        if len(self.plans.groups) < 2 or not all(row.groups for row in calibrated):
            return
        model, admitted = self._model(), self._admitted_in_groups()
        chosen = allocate([row.groups for row in calibrated], admitted, model, self.link)
        if len(set(chosen)) == 1:
            return
        option = self.plans.mixed([self.options[index].spec for index in chosen], self.link)
        loads = self.plans.link_loads(option)
        parts = [
            self.rows[index].groups[group]._replace(hops=hops, link_bytes=link_bytes)
            for group, (index, (hops, link_bytes)) in enumerate(zip(chosen, loads, strict=True))
        ]
        step_s = model.step_s(total_load(option, parts), self.link)
        if step_s * MIXED_WORTH > min(self.modelled_s(index) for index in self.admitted()):
            return
        self.options.append(option)
        self.rows.append(Row(parts))
        self._sum_up(self.singles)

    def _admitted_in_groups(self) -> list[list[int]]:
        """Returns for each group the candidates that the risk budget admits there."""
        found = []
        for group in range(len(self.plans.groups)):
            levels: list[Level] = []
            for option, row in zip(self.options, self.rows, strict=True):
                error, total = row.groups[group].error, row.groups[group].total
                known = math.isfinite(error) and math.isfinite(total) and total > 0
                level = self.risk(option.plan, error, total).level if known else "high"
                levels.append("none" if option.plan.is_dense else level)
            admitted = [i for i, level in enumerate(levels) if is_admitted(level, self.config)]
            found.append(admitted)
        return found

    def is_admitted(self, index: int) -> bool:
        """Returns whether the risk budget admits a candidate."""
        return is_admitted(self.rows[index].level, self.config)

    def admitted(self) -> list[int]:
        return [index for index in range(len(self.rows)) if self.is_admitted(index)]

    def promising(self, count: int, known: int | None = None) -> list[int]:
        """Returns the candidates to explore: predicted to be fast, at most two of a family.

        One that is `known` was measured already.
        """
        ranked = sorted(self.admitted(), key=self.predicted_s)
        bound_s = PROMISING * self.predicted_s(ranked[0])
        found: list[int] = []
        for index in ranked:
            family = self.options[index].family
            alike = sum(self.options[i].family == family for i in found)
            if alike < 2 and self.predicted_s(index) <= bound_s and index != known:
                found.append(index)
        # Uncompressed ones first: they keep no residual that they would have to send.
        return sorted(found[:count], key=lambda i: not self.options[i].is_uncompressed)

    def measured(self) -> list[int]:
        """Returns the admitted candidates that took real steps, the fastest first."""
        return sorted((i for i in self.admitted() if self.rows[i].times_s), key=self.expected_s)

    def fastest(self) -> int:
        """Returns the fastest measured candidate; among nearly equal ones that of least risk."""
        ranked = self.measured()
        bound_s = EQUAL_WITHIN * self.expected_s(ranked[0])
        close = [i for i in ranked if self.expected_s(i) <= bound_s]
        return min(close, key=lambda i: LEVELS.index(self.rows[i].level))

    def baseline(self) -> int:
        """Returns fp32, or 16 bits if they are faster by a factor that is worth it.

        Of those that were measured: a prediction is no match for a measurement.
        """
        uncompressed = [i for i in self.measured() if self.options[i].is_uncompressed]
        fastest, fp32 = uncompressed[0], min(uncompressed)
        return fastest if self.expected_s(fp32) >= WORTH * self.expected_s(fastest) else fp32

    def best_predicted(self) -> int:
        return min(self.admitted(), key=self.predicted_s)

    def describe(self) -> list[dict[str, object]]:
        """Returns the rows, for `stats()`."""
        return [self._describe_row(i) for i in range(len(self.options))]

    def _describe_row(self, index: int) -> dict[str, object]:
        row, option = self.rows[index], self.options[index]
        measured_s, predicted_s = row.measured_s(), self.predicted_s(index)
        return {
            "spec": option.spec,
            "exchange": option.plan.describe()["exchange"],
            "risk": row.level,
            "admitted": self.is_admitted(index),
            "relative_error": row.error,
            "predicted_ms": predicted_s * 1e3 if math.isfinite(predicted_s) else None,
            "measured_ms": None if measured_s is None else measured_s * 1e3,
            "codec_ms": None if row.load is None else row.load.codec_s * 1e3,
            "link_bytes": None if row.load is None else row.load.link_bytes,
        }

    def state_dict(self) -> dict[str, object]:
        rows = {
            option.spec: {**row.state_dict(), "choice": [list(pair) for pair in option.choice]}
            for option, row in zip(self.options, self.rows, strict=True)
        }
        links = [[x.latency_s, x.rate_bits] for x in (self.link, self.timed_link)]
        return {
            "rows": rows,
            "links": links,
            "compute_s": self.compute_s,
            "buckets": self.buckets,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        rows = dict(saved["rows"])
        own = [rows.pop(option.spec) for option in self.options[: self.singles]]
        if len(rows) > 1:
            raise ValueError(f"unknown candidates {[*rows]}")
        own += rows.values()
        self.options = [self.plans.of_choice(choice_of(row["choice"])) for row in own]
        self.rows = [row_of(row) for row in own]
        self.link, self.timed_link = (LinkModel(*numbers) for numbers in saved["links"])
        self.compute_s, self.buckets = saved["compute_s"], saved["buckets"]
