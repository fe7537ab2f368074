"""Kernels: the loops over memory, one interface for every device.

`reference` defines every function in torch, `cpu` implements it in Numba and `cuda` in Triton.
Compressors call `at(x).name(...)`, which picks the backend by device; `use` pins one backend for
the whole process.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, Protocol, TypeAlias, cast, get_args

import torch
from torch import Tensor

from gradwire.errors import ConfigError, MissingExtra
from gradwire.kernels.specs import Drifted, RoundingSpec, ThresholdSpec
from gradwire.types import EFInput, Key

Backend: TypeAlias = Literal["auto", "reference", "numba", "triton"]

# Backend, the device it runs on, and the extra that has it.
_COMPILED = {"numba": ("cpu", "cpu"), "triton": ("cuda", "cuda")}

_pinned: Backend = "auto"


class Kernels(Protocol):
    """The functions that every backend has."""

    def pack_bits(self, values: Tensor, width: int) -> Tensor: ...
    def unpack_bits(self, packed: Tensor, width: int, count: int) -> Tensor: ...
    def pack_index(self, index: Tensor, low: int, bitmap_bits: int) -> Tensor: ...
    def unpack_index(self, packed: Tensor, low: int, bitmap_bits: int, count: int) -> Tensor: ...
    def index_fits(
        self, packed: Tensor, low: int, bitmap_bits: int, count: int, numel: int
    ) -> Tensor: ...
    def largest(self, ef: EFInput, count: int) -> Tensor: ...
    def reaching(self, ef: EFInput, border: Tensor) -> Tensor: ...
    def sampled_border(
        self, ef: EFInput, key: Key, tried: int, top: int, enough: int
    ) -> Tensor: ...
    def factor(self, m: Tensor, base: Tensor, turned: bool) -> Tensor: ...
    def factor_sum(
        self,
        x: Tensor,
        residual: Tensor,
        decay: float,
        residual_out: Tensor,
        base: Tensor,
        turned: bool,
    ) -> Tensor: ...
    def lessen(self, m: Tensor, p: Tensor, q: Tensor) -> None: ...
    def outer(self, out: Tensor, p: Tensor, q: Tensor) -> None: ...
    def orthonormal(self, p: Tensor) -> Tensor: ...
    def bisected_border(self, ef: EFInput, count: int) -> Tensor: ...
    def excess_border(self, ef: EFInput, shares: Sequence[float]) -> Tensor: ...
    def normal_border(self, ef: EFInput, spread: float, count: int, rounds: int) -> Tensor: ...
    def lift(self, residual_out: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor: ...
    def passing(self, ef: EFInput, aim: ThresholdSpec) -> Tensor:
        """The positions of what `tell` would tell: int64, ascending."""

    def passing_in_room(self, ef: EFInput, aim: ThresholdSpec) -> tuple[Tensor, Tensor, Tensor]:
        """How many pass (int32), their positions and their values, as they are.

        In room for `aim.most` of them: anything is behind the positions, zeros behind the values.
        """

    def tell(
        self, ef: EFInput, aim: ThresholdSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """How many entries pass (int32), their positions as bytes, and their values.

        There may be more room than is needed: the first so many bytes and values count. What is
        not said stays in `ef.residual_out`.
        """

    def add_at(self, out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None: ...
    def add_packed(
        self,
        out: Tensor,
        packed: Tensor,
        low: int,
        bitmap_bits: int,
        values: Tensor,
        weight: float,
    ) -> None: ...
    def add_told(
        self, out: Tensor, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
    ) -> None: ...
    def cast_pack(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...
    def cast_pack_sum(
        self, x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, dtype: torch.dtype
    ) -> Tensor: ...
    def cast_add(self, out: Tensor, rows: Sequence[Tensor], weight: float) -> None: ...
    def depart(self, drifted: Drifted, ahead: float) -> None: ...
    def arrive(self, drifted: Drifted, rate: float) -> None: ...
    def relay(self, drifted: Drifted, rate: float, ahead: float) -> None: ...
    def strata(self, key: Key, numel: int, count: int, device: torch.device) -> Tensor: ...
    def random_blocks(
        self, key: Key, numel: int, count: int, block: int, device: torch.device
    ) -> Tensor: ...
    def sign_pack(self, x: Tensor) -> tuple[Tensor, Tensor]: ...
    def sign_pack_sum(
        self, x: Tensor, residual: Tensor, decay: float, residual_out: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def sign_add(self, out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None: ...
    def sides_pack(self, x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def sides_pack_sum(
        self, x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def sides_add(
        self, out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
    ) -> None: ...
    def votes_pack(self, x: Tensor, key: Key) -> tuple[Tensor, Tensor]: ...
    def trits_pack(self, x: Tensor, clip: float, key: Key) -> tuple[Tensor, Tensor]: ...
    def trits_add(self, out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None: ...
    def round_pack(self, x: Tensor, rule: RoundingSpec, key: Key) -> tuple[Tensor, Tensor]: ...
    def round_pack_sum(
        self,
        x: Tensor,
        residual: Tensor,
        decay: float,
        residual_out: Tensor,
        rule: RoundingSpec,
        key: Key,
    ) -> tuple[Tensor, Tensor]: ...
    def round_add(
        self, out: Tensor, codes: Tensor, scales: Tensor, weight: float, rule: RoundingSpec
    ) -> None: ...


def use(backend: Backend) -> None:
    """Pins the backend for this process; "auto" goes back to choosing by device."""
    global _pinned  # noqa: PLW0603 - one process-wide switch, set by hand
    known = get_args(Backend)
    if backend not in known:
        raise ConfigError(f"kernels: backend must be one of {[*known]}, got {backend!r}")
    if backend in _COMPILED and find_spec(backend) is None:
        raise MissingExtra(f"backend {backend!r}", backend, _COMPILED[backend][1])
    _pinned = backend


def chosen(device: torch.device) -> str:
    """The name of the backend that `at` picks for this device."""
    if _pinned in _COMPILED and device.type != _COMPILED[_pinned][0]:
        needs = _COMPILED[_pinned][0]
        raise ConfigError(f"kernels: backend {_pinned!r} runs on {needs}, got a tensor on {device}")
    if _pinned != "auto":
        return _pinned
    for backend, (kind, _) in _COMPILED.items():
        if device.type == kind and find_spec(backend) is not None:
            return backend
    return "reference"


def at(x: Tensor) -> Kernels:
    """The kernels for the device where `x` is."""
    return cast(Kernels, _module(chosen(x.device), x.device))


@cache
def _module(backend: str, device: torch.device) -> ModuleType:
    """The kernels of a backend; raises ConfigError where they cannot be compiled."""
    if backend == "triton":
        import_module("gradwire.kernels.cuda.device_check").open_for(device)
    folders = {"numba": "cpu", "triton": "cuda", "reference": "reference"}
    return import_module(f"gradwire.kernels.{folders[backend]}")
