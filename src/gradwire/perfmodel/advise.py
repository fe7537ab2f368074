"""`gradwire.advise`: ranks compression methods for a model on the network of a running DDP job."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.auto.accuracy_risk import LEVELS, Risk, assess_risk
from gradwire.auto.optimizers import is_adaptive
from gradwire.comm.base import Comm
from gradwire.comm.cost_model import Network
from gradwire.comm.groups import check_member
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compression_error import measure_error
from gradwire.perfmodel.compute import Compute, measure
from gradwire.perfmodel.intervals import Interval
from gradwire.perfmodel.overlap import StepTimes
from gradwire.perfmodel.predict import Prediction, predict_plan
from gradwire.perfmodel.probe import (
    cores_per_thread,
    load_warning,
    local_workers,
    mean_over_ranks,
    probe,
)

FP32, BITS16 = "none", "fp16"
"""Plain DDP, and DDP in 16 bits: the baselines that a method has to beat."""

SPECS = (
    FP32,
    BITS16,
    "eightbit",
    "qsgd:bits=4",
    "efsign",
    "topk:ratio=0.01",
    "randomk:ratio=0.01",
    "powersgd:rank=1",
    "powersgd:rank=4",
)
WORTH = 1.05
"""The smallest speedup that is worth a change."""
STEPS = 6
"""Steps that are measured, less if they are slow."""
_EQUAL_WITHIN = 1.03
"""Methods within this factor tie, however narrow the interval: the model is no more accurate."""


@dataclass(frozen=True)
class Option:
    """One method with its predicted cost and its risk."""

    spec: str
    exchange: str
    prediction: Prediction
    risk: Risk

    @property
    def step_s(self) -> float:
        return self.prediction.times.step_s

    @property
    def risky(self) -> bool:
        return self.risk.level == "high"

    def speedup(self, over: "Option") -> Interval:
        """Returns how many times as fast as another option this one is, by pairs of samples."""
        value = over.step_s / self.step_s
        pairs = zip(over.prediction.samples_s, self.prediction.samples_s, strict=False)
        ratios = sorted(theirs / own for theirs, own in pairs) or [value]
        cut = len(ratios) // 10
        return Interval(value, min(value, ratios[cut]), max(value, ratios[-1 - cut]))

    def ties(self, other: "Option") -> bool:
        """Returns whether two options are too close for the measurements to order them."""
        value, low, high = self.speedup(other)
        return low <= 1 <= high or max(value, 1 / value) <= _EQUAL_WITHIN


@dataclass(frozen=True)
class Advice:
    """The options, fastest first, and the choice among them; high risks come after all others."""

    setting: str
    options: tuple[Option, ...]
    warning: str | None = None

    def option(self, spec: str) -> Option:
        [found] = [option for option in self.options if option.spec == spec]
        return found

    @property
    def dense(self) -> Option:
        """The faster of the two baselines."""
        return min(self.option(FP32), self.option(BITS16), key=lambda option: option.step_s)

    @property
    def choice(self) -> Option:
        """The fastest option without a high risk; of those that tie with it that of least risk.

        Then the fewest bytes decide, which do not depend on the noise of a measurement. A fast step
        in a wrong direction is no gain, so no speed makes up for a high risk, and neither does one
        that measurements admit but do not show.
        """
        best = min(self._fastest(), key=_by_risk_and_bytes)
        return best if best.speedup(self.dense).low > WORTH else self.dense

    def _fastest(self) -> list[Option]:
        """Returns the fastest option without a high risk, and those that tie with it."""
        safe = [option for option in self.options if not option.risky]
        return [option for option in safe if option.ties(safe[0])]

    @property
    def tied(self) -> list[Option]:
        """The options that may be as fast as the choice, without it."""
        if not self.compresses:
            best = min(self._fastest(), key=_by_risk_and_bytes)
            # A gain that is likely but not sure.
            return [best] if best.speedup(self.dense).high > WORTH and best != self.dense else []
        return [option for option in self._fastest() if option is not self.choice]

    @property
    def risky_alternative(self) -> Option | None:
        """The fastest option with a high risk, if it is worth a change from the choice."""
        risky = next((o for o in self.options if o.risky), None)
        gains = risky is not None and self.choice.step_s > WORTH * risky.step_s
        return risky if gains else None

    @property
    def compresses(self) -> bool:
        return self.choice.spec not in (FP32, BITS16)

    def recommendation(self) -> str:
        recommended = self._compress_text() if self.compresses else self._dense_text()
        recommended += self._tie_text()
        if (risky := self.risky_alternative) is None:
            return recommended
        return (
            f"{recommended} {risky.spec} would be {self.choice.step_s / risky.step_s:.2f} times as "
            f"fast as that, but its risk to accuracy is {risky.risk.describe()}: only a training "
            "run can show whether it is acceptable."
        )

    def _tie_text(self) -> str:
        if not (tied := self.tied):
            return ""
        names = ", ".join(option.spec for option in tied)
        if not self.compresses:
            gain = _times(tied[0].speedup(self.dense))
            return f" A tie: {names} is {gain} as fast; measure again, or try it with `doctor`."
        return f" A tie, decided by risk and bytes: {names} may be as fast."

    def _compress_text(self) -> str:
        over16, over32 = (_times(self.choice.speedup(self.option(s))) for s in (BITS16, FP32))
        return (
            f"Use {self.choice.spec}: {over16} as fast as DDP in 16 bits, "
            f"{over32} as fast as in fp32. "
            f"Risk to accuracy: {self.choice.risk.describe()}."
        )

    def _dense_text(self) -> str:
        which = (
            "no method"
            if self.risky_alternative is None
            else "no method without a high risk to accuracy"
        )
        in_16_bits = self.choice.spec == BITS16
        where, rounds_like = ("16 bits", "in 16 bits") if in_16_bits else ("fp32", "as it is")
        sure = " beyond doubt" if self.tied else ""
        gain = f"{which} gains more than {WORTH - 1:.0%} over DDP in {where}{sure}"
        return f"Do not compress here: {gain}. Use DDP {rounds_like}."

    def __str__(self) -> str:
        rows = [_HEADER, *(self._row(option) for option in self.options)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(_pad_row(row, widths)).rstrip() for row in rows]
        if risky := sum(option.risky for option in self.options):
            lines[-risky:-risky] = ["", _RISKY_HEADING]
        warned = [] if self.warning is None else [self.warning, ""]
        return "\n".join([self.setting, "", *warned, *lines, "", self.recommendation()])

    def _row(self, option: Option) -> tuple[str, ...]:
        fp32, bits16 = self.option(FP32), self.option(BITS16)
        return (
            option.spec,
            option.exchange,
            f"{option.step_s * 1e3:.1f} ms",
            _range(option.speedup(fp32)),
            _range(option.speedup(bits16)),
            f"{option.prediction.sent_bytes / 1e6:.3g} MB",
            f"{option.risk.relative_error:.2f}",
            option.risk.describe(),
        )


_HEADER = ("method", "exchange", "step", "x fp32", "x fp16", "sent", "error", "risk to accuracy")
_RISKY_HEADING = "Not advised, since the risk to accuracy is high:"
_TEXT_COLUMNS = (0, 1, len(_HEADER) - 1)


def _by_risk_and_bytes(option: Option) -> tuple[int, float, float]:
    return LEVELS.index(option.risk.level), option.prediction.sent_bytes, option.step_s


def _range(ratio: Interval) -> str:
    """Returns a ratio with its interval, if that is not narrower than the digits shown."""
    value, low, high = (f"{number:.2f}" for number in ratio)
    return value if low == high else f"{value} ({low}-{high})"


def _times(ratio: Interval) -> str:
    value, low, high = (f"{number:.2f}" for number in ratio)
    return f"{value} times" if low == high else f"{value} times ({low} to {high})"


def _pad_row(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Aligns text to the left and numbers to the right."""
    pairs = enumerate(zip(row, widths, strict=True))
    return [text.ljust(n) if i in _TEXT_COLUMNS else text.rjust(n) for i, (text, n) in pairs]


def predict_options(
    plans: Mapping[str, Plan],
    compute: Compute,
    tensors: Mapping[str, Tensor],
    size: int,
    network: Network,
    cores: float,
    adaptive: bool,
) -> list[Option]:
    """Predicts cost and risk of each plan, in the order given.

    `adaptive`: the optimiser rescales every entry, as Adam does.
    """
    return [
        Option(
            spec,
            plan.describe()["exchange"],
            predict_plan(plan, compute, tensors, size, network, cores),
            assess_risk(plan, measure_error(plan, tensors, compute.steps), size, adaptive),
        )
        for spec, plan in plans.items()
    ]


def rank_options(setting: str, options: Sequence[Option], warning: str | None = None) -> Advice:
    ranked = sorted(options, key=lambda option: (option.risky, option.step_s))
    return Advice(setting, tuple(ranked), warning)


def advise(
    model: DDP,
    loss: Callable[[nn.Module], Tensor],
    optimizer: Optimizer | Callable[[nn.Module], Optimizer],
    *,
    specs: Sequence[str] | str = SPECS,
    process_group: dist.ProcessGroup | None = None,
) -> Advice:
    """Returns a ranked table of methods for this model on the links between its ranks; `print` it.

    Call it on all ranks, between two steps: it probes their links, and measures a copy of the model
    with `loss(copy)` and the methods on its gradients. `optimizer` is the one that trains the
    model, which is copied too, or a function of the copy that makes one: its step is timed, and the
    risk of a method depends on its kind. All ranks return the same.
    """
    if not isinstance(model, DDP):
        raise ConfigError(f"advise: expected a DistributedDataParallel, got {type(model).__name__}")
    if not callable(loss):
        raise ConfigError(f"advise: loss must be a function of the model, got {loss!r}")
    if not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise ConfigError(
            "advise: optimizer must be a torch.optim.Optimizer or a function of the model that "
            f"makes one, got {optimizer!r}"
        )
    group = model.process_group if process_group is None else process_group
    check_member(group)
    comm = ProcessGroupComm(group)
    copy, built = _copies(model.module, optimizer)
    tensors: dict[str, Tensor] = {n: p for n, p in copy.named_parameters() if p.requires_grad}
    device = next(iter(tensors.values())).device
    # Built first, so that a wrong spec is refused before the measurements, which take a while.
    plans = {
        spec: make_plan(spec, None, "auto", tensors, comm.size)
        for spec in dict.fromkeys((FP32, BITS16, *_as_list(specs)))
    }
    warning = load_warning()
    network = probe(comm, device)
    cores = cores_per_thread(local_workers(comm, device), device)
    adaptive = is_adaptive(built)
    compute = measure(copy, lambda net, step: loss(net), lambda: _update(built), STEPS)
    options = predict_options(plans, compute, tensors, comm.size, network, cores, adaptive)
    averaged = [
        _mean_option(comm, device, option, plans[option.spec], adaptive) for option in options
    ]
    count = sum(tensor.numel() for tensor in tensors.values())
    links = network.link.describe()
    return rank_options(
        f"{count / 1e6:.3g} M parameters on {device.type}, {comm.size} workers, links as probed: "
        f"{links} a hop",
        averaged,
        warning,
    )


def _copies(
    module: nn.Module, optimizer: Optimizer | Callable[[nn.Module], Optimizer]
) -> tuple[nn.Module, Optimizer]:
    """Returns a copy of the model, and an optimiser of that copy."""
    if isinstance(optimizer, Optimizer):
        # Copied together, so that the new optimiser holds the new parameters.
        return deepcopy((module, optimizer))
    copy = deepcopy(module)
    return copy, optimizer(copy)


def _as_list(specs: Sequence[str] | str) -> Sequence[str]:
    """Returns a list of specs; a single string is one spec."""
    several = [specs] if isinstance(specs, str) else specs
    if not isinstance(several, Sequence) or not all(isinstance(spec, str) for spec in several):
        raise ConfigError(f"advise: specs must be spec strings, got {specs!r}")
    return several


def _update(optimizer: Optimizer) -> None:
    optimizer.step()


def _mean_option(
    comm: Comm, device: torch.device, option: Option, plan: Plan, adaptive: bool
) -> Option:
    """Returns the option with times and error averaged over all ranks."""
    times = option.prediction.times
    own = [*times, option.risk.relative_error, *option.prediction.samples_s]
    means = mean_over_ranks(comm, device, own)
    count = len(times)
    error, samples_s = means[count], tuple(means[count + 1 :])
    prediction = replace(option.prediction, times=StepTimes(*means[:count]), samples_s=samples_s)
    return replace(
        option, prediction=prediction, risk=assess_risk(plan, error, comm.size, adaptive)
    )
