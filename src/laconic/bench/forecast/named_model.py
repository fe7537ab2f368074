"""The user's own model, named as `module:function`, for the adviser."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from laconic.bench.forecast.subject import Subject, measure_model
from laconic.errors import ConfigError


class Named(NamedTuple):
    """A model and how to have its loss."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


def measure_named(name: str, input_shape: str | None, device: str) -> Subject:
    """The model that `module:function` builds, measured with a step of plain SGD."""
    model, loss = named_model(name, input_shape, device)
    optimiser = SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimiser.step()

    return measure_model(name, model, lambda net, number: loss(net), step)


def named_model(name: str, input_shape: str | None, device: str) -> Named:
    """What the function returns: a model and its loss, or a model that is fed random numbers."""
    made = _call(name)
    if isinstance(made, nn.Module):
        return Named(made.to(device), _random_loss(name, _shape(name, input_shape), device))
    if isinstance(made, tuple) and len(made) == 2:
        model, loss = made
        if isinstance(model, nn.Module) and callable(loss):
            return Named(model.to(device), loss)
    raise ConfigError(
        f"model: {name} must return a torch.nn.Module, or a pair of one and a function "
        f"loss(model), got {type(made).__name__}"
    )


def _call(name: str) -> object:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"model: expected module:function, got {name!r}")
    # As with `python -m`: what lies in the current folder can be imported.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"model: cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"model: {module_name!r} has no function {function_name!r}")
    made: object = function()
    return made


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
    """The mean square of what a model makes of random numbers."""
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
