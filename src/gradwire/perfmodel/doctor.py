"""`gradwire.doctor`: names the bottleneck of a data-parallel job, and what a method would gain."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.auto.accuracy_risk import Risk, assess_risk
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.intervals import (
    Interval,
    difference_interval,
    median_interval,
    ratio_interval,
)
from gradwire.perfmodel.step_watch import DENSE, MeasurementDone, StepWatch, Trial, Watched

WORTH = 1.05
"""The smallest speed-up that is worth a change."""
_MINOR, _MAJOR = 0.05, 0.5
"""Shares of a step up to which, and from which on, waiting for the exchange is the bottleneck."""
_UNEQUAL = 1.15
"""Ranks whose steps differ by more than this factor are worth a line."""
_HALF = "fp16"


@dataclass(frozen=True)
class Gain:
    """A method that ran: its speed-up over the faster of 32 and 16 bits, and its risk."""

    trial: Trial
    speedup: Interval
    risk: Risk

    @property
    def is_worth(self) -> bool:
        return self.speedup.low > WORTH and self.risk.level != "high"


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a job; `print` it. All ranks have the same."""

    watched: Watched
    step_s: Interval
    exposed_s: Interval
    gains: tuple[Gain, ...]
    """Fastest first, without the two baselines."""

    @property
    def bottleneck(self) -> str:
        """Returns compute, link or both; unknown if the interval does not decide on compute."""
        low, middle, high = (
            seconds / self.step_s.value
            for seconds in (self.exposed_s.low, self.exposed_s.value, self.exposed_s.high)
        )
        if low < _MINOR < high:
            return "unknown"
        return "compute" if middle <= _MINOR else "link" if middle >= _MAJOR else "both"

    @property
    def choice(self) -> Gain | None:
        """The fastest method that is worth it, of those whose risk is not high."""
        return next((gain for gain in self.gains if gain.is_worth), None)

    @property
    def line(self) -> str | None:
        """The line to add to the script, or None if it should not compress here."""
        if self.choice is None:
            return None
        function = "attach" if self.watched.kind == "DDP" else "attach_fsdp"
        return f'link = gradwire.{function}(model, "{self.choice.trial.spec}")'

    def __str__(self) -> str:
        seen = self.watched
        count = sum(p.numel() for p in seen.parameters)
        lines = [
            f"{seen.kind} with {count / 1e6:.3g} M parameters on {seen.workers} ranks, "
            f"{seen.backend}",
            *seen.links.lines(),
            f"step: {self.step_s.format(' ms', 1e3)}, of which training waits "
            f"{self.exposed_s.format(' ms', 1e3)} for the exchange",
            *self._balance(),
            f"bottleneck: {_EXPLAINED[self.bottleneck]}",
            "",
            *self._trial_lines(),
            *self._verdict(),
        ]
        return "\n".join(lines)

    def _balance(self) -> list[str]:
        times = self.watched.rank_alone_s
        slow, fast = max(times), min(times)
        if slow <= _UNEQUAL * fast:
            return []
        return [
            f"ranks differ: rank {times.index(slow)} takes {slow / fast:.2f} times as long for a "
            f"step as rank {times.index(fast)} without any exchange; all wait for it"
        ]

    def _trial_lines(self) -> list[str]:
        found = [
            f"{gain.trial.spec}: {gain.speedup.format(' times as fast')}, "
            f"{gain.trial.sent_bytes / 1e6:.3g} MB a step, risk to accuracy {gain.risk.describe()}"
            for gain in self.gains
        ]
        refused = [trial for trial in self.watched.trials if trial.refused is not None]
        return found + [f"{trial.spec}: not tried: {trial.refused}" for trial in refused]

    def _verdict(self) -> list[str]:
        if self.choice is None:
            return [f"Do not compress here: {self._reason()}."]
        speedup = self.choice.speedup.format(" times as fast")
        return [
            f"Add this line: a step is {speedup} as with the faster of 32 and 16 bits.",
            f"    {self.line}",
        ]

    def _reason(self) -> str:
        if not self.gains:
            return "no method was tried"
        if self.gains[0].speedup.low > WORTH:
            return f"the risk of {self.gains[0].trial.spec} to accuracy is high"
        return f"no method is {WORTH:g} times as fast beyond doubt"


_EXPLAINED = {
    "compute": "compute, data loading or the optimiser (measured as one): the exchange is hidden",
    "both": "both: computing, and the links for the part of a step that waits for them",
    "link": "the links: most of a step waits for the exchange",
    "unknown": "unknown: times vary more than the exchange takes; repeat on a quiet machine",
}


def diagnose(watched: Watched) -> Diagnosis:
    """Draws the conclusions from the measurements of a job."""
    trials = {trial.spec: trial for trial in watched.trials if trial.steps_s}
    baselines = [trials[spec] for spec in (DENSE, _HALF) if spec in trials]
    others = [trial for spec, trial in trials.items() if spec not in (DENSE, _HALF)]
    gains = [_gain(trial, baselines, watched) for trial in others if baselines]
    return Diagnosis(
        watched,
        median_interval(watched.exchange_s),
        difference_interval(watched.exchange_s, watched.alone_s),
        tuple(sorted(gains, key=lambda gain: -gain.speedup.value)),
    )


def _gain(trial: Trial, baselines: list[Trial], watched: Watched) -> Gain:
    ratios = [ratio_interval(base.steps_s, trial.steps_s) for base in baselines]
    plan = make_plan(trial.spec, None, "auto", watched.parameters, watched.workers)
    # Without a known optimiser the stricter rule holds.
    adaptive = watched.adaptive is not False
    risk = assess_risk(plan, trial.relative_error, watched.workers, adaptive)
    return Gain(trial, min(ratios, key=lambda ratio: ratio.value), risk)


def doctor(
    model: DDP,
    loss: Callable[[nn.Module], Tensor],
    optimizer: Optimizer,
    *,
    seconds: float = 120.0,
) -> Diagnosis:
    """Measures a running job, and decides whether it should compress; `print` the result.

    Call it on all ranks between two steps. It times steps of a copy of the model, `loss(copy)` and
    the copied optimiser, with the exchange and without it, then with some methods, for about so
    many `seconds` in all; links are measured first. Nothing that is passed changes.
    """
    if not isinstance(model, DDP):
        raise ConfigError(f"doctor: expected a DistributedDataParallel, got {type(model).__name__}")
    if not callable(loss) or not isinstance(optimizer, Optimizer):
        raise ConfigError("doctor: expected a function of the model, and a torch.optim.Optimizer")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"doctor: seconds must be positive, got {seconds!r}")
    module, own = deepcopy((model.module, optimizer))
    copy = DDP(module, process_group=model.process_group)
    watch = StepWatch(seconds)
    watch.follow(copy, own)
    try:
        while True:
            own.zero_grad()
            loss(copy).backward()
            own.step()
    except MeasurementDone:
        assert watch.result is not None
        return diagnose(watch.result)
    finally:
        watch.close()
