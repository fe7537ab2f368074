"""Variables of Keras and TensorFlow: their backend, names, shapes and dtypes."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import keras
import torch
from torch import nn

from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.keras.backend import Framework, Torch


def framework_of(variables: Sequence[Any]) -> Framework:
    """Returns the framework of the variables; without any, that of Keras's backend."""
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "torch"):
        raise ConfigError(
            f"gradwire.keras: gradients of Keras's backend {backend!r} do not leave its compiled "
            "step; set KERAS_BACKEND to tensorflow or torch"
        )
    if backend == "torch" and all(isinstance(v, keras.Variable) for v in variables):
        return Torch()
    return tensorflow()


def tensorflow() -> Framework:
    if find_spec("tensorflow") is None:
        raise MissingExtra("gradwire.keras", "tensorflow", "tf")
    from gradwire.integrations.keras.tensorflow import TensorFlow

    return TensorFlow()


def name_of(variable: Any) -> str:
    path: str = variable.path if isinstance(variable, keras.Variable) else variable.name
    return path.removesuffix(":0")


def names_of(variables: Sequence[Any]) -> list[str]:
    """Returns unique names: variables that share one are numbered in their order."""
    if not variables:
        raise ConfigError("there is no variable to train")
    names: list[str] = []
    for variable in variables:
        name, number = name_of(variable), 1
        while (own := name if number == 1 else f"{name}#{number}") in names:
            number += 1
        names.append(own)
    return names


def placeholder(variable: Any, device: torch.device) -> nn.Parameter:
    """Returns a parameter of the variable's shape and dtype, which takes no memory."""
    dtype = getattr(torch, keras.backend.standardize_dtype(variable.dtype))
    form = torch.zeros((), dtype=dtype, device=device).expand(tuple(variable.shape))
    return nn.Parameter(form, requires_grad=False)
