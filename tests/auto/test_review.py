"""The search of the automatic mode on noisy clocks: reviews repair a choice that noise misled."""

import math
import random
from statistics import median

from torch import nn

from gradwire.auto.auto import Auto
from gradwire.auto.calibration import Calibration
from gradwire.auto.groups import parameter_groups
from gradwire.auto.plans import Plans
from gradwire.auto.runtime import _typical
from gradwire.auto.search import Search, StepFacts
from gradwire.auto.table import RETRIES, Table
from gradwire.comm.cost_model import LinkModel
from gradwire.control.timing import StepTiming
from gradwire.engine.make_plan import make_plan

WORKERS = 4
LINK = LinkModel(8e-4, 5e9)
STEP_MS = (99, 108, 110, 95, 95, 100, 95, 83, 85, 110, 79, 82)
"""True step times of the candidates; about those of an MLP, with four workers on two cores."""
CODEC_MS = (1, 3, 32, 20, 10, 21, 34, 18, 7, 47, 14, 28)
MEGABYTES = (34.9, 17.5, 8.8, 4.7, 4.7, 0.24, 0.13, 0.08, 2.2, 4.7, 0.59, 0.33)
"""Costs of the candidates as calibrations measure them, which do not explain all of a step."""
SLOW_AT_FIRST = {1: 3.0, 2: 1.5, 3: 1.3}
"""Factors of a candidate's first steps: kernels are compiled, and memory is allocated."""


def new_search() -> Search:
    named = dict(nn.Sequential(nn.Linear(784, 2048), nn.Linear(2048, 10)).named_parameters())
    plan = make_plan("none", None, "auto", named.values(), WORKERS)
    tensors, groups = tuple(named.values()), (parameter_groups(named)[0],)
    plans = Plans(plan, tensors, groups, WORKERS, adaptive=False)
    return Search(Table(Auto(), plans, LINK, overlaps=True), 0)


class NoisyRun:
    """Feeds a search with step times of a busy machine, reported as the runtime reports them."""

    def __init__(self, seed: int, noise: float) -> None:
        self.random, self.noise = random.Random(seed), noise
        self.search = new_search()
        self.settings: list[str] = []
        self._taken = dict.fromkeys(range(len(STEP_MS)), 0)
        self._calibrations: dict[int, list[Calibration]] = {}
        self._window: list[StepTiming] = []
        self._timed: int | None = None
        self._excluded = True

    def step(self) -> None:
        search = self.search
        now, is_quiet = search.current, search.is_quiet
        timing = self._take(now)
        facts = StepFacts(len(self.settings) + 1, None, None, {}, None, True)
        if not is_quiet:
            known = _typical(self._window) if self._window else None
            facts = facts._replace(timing=known, timed=self._timed, calibrations=self._calibrations)
            self._window, self._timed, self._calibrations = [], None, {}
        reports = search.table.options[now].is_uncompressed and not is_quiet
        if not (self._excluded or reports or search.phase == "calibrate"):
            if self._timed != now or search.phase == "settled":
                self._window = []
            self._window.append(timing)
            self._timed = now
        search.end_step(facts)
        self._calibrations |= {i: [self._calibration(i)] for i in search.to_calibrate()}
        self._excluded = search.current != now
        self.settings.append(search.spec)

    def _take(self, index: int) -> StepTiming:
        step_s = self._step_s(index)
        return StepTiming(step_s, 0.01, step_s / 2, 1e6 * MEGABYTES[index], 0.4 * step_s)

    def _step_s(self, index: int) -> float:
        self._taken[index] += 1
        hiccup = 2.0 if self.random.random() < 0.1 else 1.0
        noise = math.exp(self.random.gauss(0, self.noise))
        return 1e-3 * STEP_MS[index] * SLOW_AT_FIRST.get(self._taken[index], 1.0) * hiccup * noise

    def _calibration(self, index: int) -> Calibration:
        codec_s = 1e-3 * CODEC_MS[index] * math.exp(self.random.gauss(0, self.noise))
        return Calibration(codec_s, 2.0, 1e6 * MEGABYTES[index], error=0.3, total=1.0)

    def loss(self) -> float:
        """Returns the true step time of the setting, over that of the best."""
        return STEP_MS[self.search.current] / min(STEP_MS)


def test_noise_and_slow_first_steps_do_not_decide() -> None:
    runs = [NoisyRun(seed, noise=0.2) for seed in range(60)]
    for run in runs:
        for _ in range(50):
            run.step()
        assert run.search.settled_at is not None
    early = [run.loss() for run in runs]
    for run in runs:
        for _ in range(250):
            run.step()
    late = [run.loss() for run in runs]
    # Of other seeds 92 and 96 of 100; before candidates had rounds 50, and 73 if all reported.
    assert sum(loss <= 1.1 for loss in early) >= 0.85 * len(runs)
    assert sum(early) / len(early) < 1.08
    assert sum(loss <= 1.1 for loss in late) >= 0.95 * len(runs)
    assert median(late) < 1.06


def test_reviews_become_rare_and_end() -> None:
    run = NoisyRun(seed=1, noise=0.2)
    for _ in range(3000):
        run.step()
    assert all(row.retries <= RETRIES for row in run.search.table.rows)
    assert len(set(run.settings[-500:])) == 1
    assert len(run.search.state_dict()["settled_s"]) <= 48  # type: ignore[arg-type]


def test_a_review_survives_a_checkpoint() -> None:
    run = NoisyRun(seed=2, noise=0.2)
    while run.search.phase != "review":
        run.step()
    saved = run.search.state_dict()
    other = new_search()
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    assert other.phase == "review"
