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

TENSOR = {"dtype", "shape", "base64"}


def seal(state: object) -> str:
    """All of a state of numbers, texts, tensors, and lists and dicts of them."""
    return json.dumps(_sealed(state))


def unseal(text: object, device: torch.device) -> object:
    """What was sealed, its tensors on this device; ConfigError where that cannot be read."""
    if not isinstance(text, str):
        raise ConfigError(f"state: a sealed part must be a text, got {type(text).__name__}")
    try:
        return _unsealed(json.loads(text), device)
    except ValueError as error:
        raise ConfigError(f"state: a sealed part is broken: {error}") from None


def _sealed(value: object) -> object:
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = b64encode(raw.numpy().tobytes()).decode()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "base64": text}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "other keys would come back as texts"
        return {key: _sealed(item) for key, item in value.items()}
    return [_sealed(item) for item in value] if isinstance(value, list | tuple) else value


def _unsealed(value: object, device: torch.device) -> object:
    if isinstance(value, dict) and value.keys() == TENSOR:
        raw = np.frombuffer(bytearray(b64decode(value["base64"])), dtype=np.uint8)
        dtype: torch.dtype = getattr(torch, value["dtype"])
        return torch.from_numpy(raw).view(dtype).reshape(value["shape"]).to(device)
    if isinstance(value, dict):
        return {key: _unsealed(item, device) for key, item in value.items()}
    return [_unsealed(item, device) for item in value] if isinstance(value, list) else value
