"""Describes a state as JSON, apart from the bytes of its tensors.

Numbers, strings and None describe themselves. All else is a list whose first item is its kind:
["tensor", dtype, shape], ["list", ...], ["tuple", ...] or ["dict", [key, value], ...].
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigError

MAX_DIMENSIONS = 64

_MAX_NUMEL = 1 << 59
"""Bound of a shape's product, below which torch computes sizes and strides without overflow."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint64, torch.uint32, torch.uint16, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    )
}  # fmt: skip


class TensorSpec(NamedTuple):
    """Type, shape and size of a tensor."""

    dtype: torch.dtype
    shape: list[int]
    nbytes: int


def describe(state: Mapping[str, object]) -> tuple[bytes, list[Tensor]]:
    """Returns the description of a state, and its tensors in the order of the description."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(state, tensors)).encode()
    return text, tensors


def _described(value: object, tensors: list[Tensor]) -> object:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ConfigError(f"state: only dense tensors can be sent, got {value.layout}")
        dtype, shape = str(value.dtype).removeprefix("torch."), [*value.shape]
        try:
            _tensor_spec(dtype, shape)
        except ValueError as error:
            raise ConfigError(f"state: a tensor cannot be sent: {error}") from error
        tensors.append(value)
        return ["tensor", dtype, shape]
    if isinstance(value, Mapping):
        return ["dict", *([_key(key), _described(v, tensors)] for key, v in value.items())]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_described(item, tensors) for item in value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"state: a {type(value).__name__} cannot be sent, only numbers and tensors")


def _key(key: object) -> object:
    if isinstance(key, str | int):
        return key
    raise ConfigError(f"state: keys must be strings or whole numbers, got {key!r}")


def tensor_specs(tree: object) -> list[TensorSpec]:
    """Returns the tensors of a description; raises ValueError unless all of it is valid."""
    return list(_specs(tree))


def _specs(tree: object) -> Iterator[TensorSpec]:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise ValueError("an object of JSON has no meaning here")
        return
    kind, *items = tree or [None]
    if kind == "tensor" and len(items) == 2:
        yield _tensor_spec(*items)
    elif kind == "dict":
        keys = [item[0] for item in items if isinstance(item, list) and len(item) == 2]
        if len(keys) < len(items) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError("a dict has an item that is not a key and a value")
        if len({*keys}) < len(keys):
            raise ValueError("a dict has a key twice")
        for _, value in items:
            yield from _specs(value)
    elif kind in ("list", "tuple"):
        for item in items:
            yield from _specs(item)
    else:
        raise ValueError(f"no value is described by {str(tree)[:40]}")


def build(tree: object, tensors: Sequence[Tensor]) -> object:
    """Returns the state of a description that `tensor_specs` has checked."""
    return _built(tree, iter(tensors))


def _built(tree: object, tensors: Iterator[Tensor]) -> object:
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _built(value, tensors) for key, value in items}
    values = [_built(item, tensors) for item in items]
    return values if kind == "list" else tuple(values)


def _tensor_spec(dtype: object, shape: object) -> TensorSpec:
    """Validates a type and a shape; raises ValueError if one is broken."""
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {[*_DTYPES]}, got {str(dtype)[:40]}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape must be a list of at most {MAX_DIMENSIONS} lengths")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape must have whole numbers, at least 0, got {str(shape)[:40]}")
    if math.prod(max(length, 1) for length in shape) > _MAX_NUMEL:
        raise ValueError(f"shape is too large: {str(shape)[:40]}")
    return TensorSpec(_DTYPES[dtype], shape, math.prod(shape) * _DTYPES[dtype].itemsize)
