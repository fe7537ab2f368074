"""Serialises a state whose entries change over time into one JSON string.

torch.distributed.checkpoint descends into dicts and lists, and loads only entries that the fresh
state of a new run has too; their tensors must have the same shape. Entries that were added since
the start, such as the statistics of a controller, would be lost silently.
"""

import json
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


def from_json(text: object, device: torch.device) -> object:
    """Returns the state that `to_json` serialised, on this device; ConfigError if it is broken."""
    if not isinstance(text, str):
        raise ConfigError(f"state: a JSON part must be a string, got {type(text).__name__}")
    try:
        return _decoded(json.loads(text), device)
    except ValueError as error:
        raise ConfigError(f"state: a JSON part is broken: {error}") from None


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


def _decoded(value: object, device: torch.device) -> object:
    if isinstance(value, dict) and value.keys() == TENSOR_KEYS:
        raw = np.frombuffer(bytearray(b64decode(value["base64"])), dtype=np.uint8)
        dtype: torch.dtype = getattr(torch, value["dtype"])
        return torch.from_numpy(raw).view(dtype).reshape(value["shape"]).to(device)
    if isinstance(value, dict):
        return {key: _decoded(item, device) for key, item in value.items()}
    return [_decoded(item, device) for item in value] if isinstance(value, list) else value
