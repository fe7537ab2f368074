"""`gradwire advise`: predicts whether compression pays for a model that is not running yet.

The model is a workload, or the user's own, named as `module:function`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.auto.optimizers import find_optimizer, is_adaptive
from gradwire.bench.machine import machine_facts
from gradwire.bench.predictions.forecast_records import Setting
from gradwire.bench.predictions.measured_model import MeasuredModel, measure_model, plan_of
from gradwire.bench.predictions.simulate import MAX_WORKERS, Links
from gradwire.bench.records.files import append
from gradwire.checks import check_whole
from gradwire.comm.cost_model import format_rate
from gradwire.errors import ConfigError
from gradwire.perfmodel.advise import (
    BITS16,
    FP32,
    STEPS,
    Advice,
    predict_options,
    rank_options,
)
from gradwire.perfmodel.probe import cores_per_thread, load_warning


class ModelAndLoss(NamedTuple):
    """A model and a function that computes its loss."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


def measure_named(
    name: str, input_shape: str | None, device: str, optimizer_name: str
) -> MeasuredModel:
    """Measures the model that `module:function` builds, with a step of the named optimiser."""
    optimizer_class = find_optimizer(optimizer_name)
    model, loss = named_model(name, input_shape, device)
    # Constructed as every class of torch.optim can be; their common base needs the defaults too.
    optimizer: Optimizer = cast(Any, optimizer_class)(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.step()

    return measure_model(
        name, model, lambda net, number: loss(net), step, is_adaptive(optimizer), STEPS
    )


def named_model(name: str, input_shape: str | None, device: str) -> ModelAndLoss:
    """Calls `module:function`; a model without a loss gets one on random inputs."""
    built = _call(name)
    if isinstance(built, nn.Module):
        return ModelAndLoss(built.to(device), _random_loss(name, _shape(name, input_shape), device))
    if isinstance(built, tuple) and len(built) == 2:
        model, loss = built
        if isinstance(model, nn.Module) and callable(loss):
            return ModelAndLoss(model.to(device), loss)
    raise ConfigError(
        f"model: {name} must return a torch.nn.Module, or a pair of one and a function "
        f"loss(model), got {type(built).__name__}"
    )


def _call(name: str) -> object:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"model: expected module:function, got {name!r}")
    # As with `python -m`, modules of the current folder can be imported.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"model: cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"model: {module_name!r} has no function {function_name!r}")
    built: object = function()
    return built


def _shape(name: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        raise ConfigError(
            f"model: {name} returns a model alone; give the shape of a batch such as "
            "--input 32x3x224x224, or return (model, loss) with loss(model)"
        )
    try:
        shape = tuple(int(word) for word in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"input: expected numbers such as 32x3x224x224, got {text!r}")
    return shape


def _random_loss(name: str, shape: tuple[int, ...], device: str) -> Callable[[nn.Module], Tensor]:
    """Returns a loss: the mean square of the model's output for a random batch."""
    batch = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)

    def loss(model: nn.Module) -> Tensor:
        try:
            output = model(batch)
        except (RuntimeError, TypeError) as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"model: {name} cannot take {tuple(shape)}: {first}; "
                "give another --input, or return (model, loss) with loss(model)"
            ) from error
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"model: {name} gives {type(output).__name__}, not a tensor; "
                "return (model, loss) with loss(model)"
            )
        return output.float().square().mean()

    return loss


def advise_on(measured: MeasuredModel, cases: Sequence[str], workers: int, links: Links) -> Advice:
    """Ranks methods by their predicted step, with one worker per machine like this one."""
    check_whole("advise", "workers", workers, 2, MAX_WORKERS)
    network = links.network()
    names = dict.fromkeys((FP32, BITS16, *cases))
    plans = {name: plan_of(name, measured.tensors, workers) for name in names}
    cores = cores_per_thread(1, measured.device)
    options = predict_options(
        plans, measured.compute, measured.tensors, workers, network, cores, measured.adaptive
    )
    setting = (
        f"{measured.title}: {measured.parameters / 1e6:.3g} M parameters on {measured.device}, "
        f"{measured.compute.compute_s * 1e3:.3g} ms a step without exchange; {workers} workers, "
        f"links of {network.link.describe()}"
    )
    return rank_options(setting, options, load_warning())


def write_advice(
    path: Path, measured: MeasuredModel, workers: int, links: Links, advice: Advice, command: str
) -> None:
    """Appends one forecast record per option to a file."""
    setting = Setting(
        measured.title,
        measured.parameters,
        format_rate(links.rate_bits),
        links.latency_s * 1e3,
        str(measured.device),
        command,
        machine_facts(),
    )
    for option in advice.options:
        record = setting.record(option.spec, option.exchange, workers, option.prediction)
        risk = option.risk
        assessed = replace(
            record,
            relative_error=risk.relative_error,
            risk=risk.level,
            advised=option is advice.choice,
        )
        append(path, assessed)
