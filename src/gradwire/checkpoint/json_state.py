"""Serialises a state whose entries change over time into one JSON string.

torch.distributed.checkpoint descends into dicts and lists, and loads only entries that the fresh
state of a new run has too; their tensors must have the same shape. Entries that were added since
the start, such as the statistics of a controller, would be lost silently.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError

TENSOR_KEYS = {"dtype", "shape", "base64"}


def to_json(state: object) -> str:
    """Serialises a state of numbers, strings, tensors, and lists and dicts of them."""
    return json.dumps(_encoded(state))


def from_json(name: str, text: object, device: torch.device) -> object:
    """Returns the state that `to_json` serialised, on this device.

    Raises ConfigError if it is broken, or has a number that is not finite.
    """
    if not isinstance(text, str):
        raise ConfigError(f"state: {name}: expected a string of JSON, got {type(text).__name__}")
    try:
        return _decoded(json.loads(text), device, "")
    except _NotFinite as error:
        raise ConfigError(f"state: {name}: {error}") from None
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"state: {name}: this JSON is broken: {error}") from None


class _NotFinite(Exception):
    """A number or an entry of a tensor is infinite or NaN."""


def _encoded(value: object) -> object:
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = b64encode(raw.numpy().tobytes()).decode()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "base64": text}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "JSON turns other keys into strings"
        return {key: _encoded(item) for key, item in value.items()}
    return [_encoded(item) for item in value] if isinstance(value, list | tuple) else value


def _decoded(value: object, device: torch.device, path: str) -> object:
    if isinstance(value, dict) and value.keys() == TENSOR_KEYS:
        raw = np.frombuffer(bytearray(b64decode(value["base64"])), dtype=np.uint8)
        dtype: torch.dtype = getattr(torch, value["dtype"])
        tensor = torch.from_numpy(raw).view(dtype).reshape(value["shape"])
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise _NotFinite(f"{path} has entries that are not finite")
        return tensor.to(device)
    if isinstance(value, dict):
        dot = "." if path else ""
        return {key: _decoded(item, device, f"{path}{dot}{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item, device, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise _NotFinite(f"{path} is {value}, not finite")
    return value
