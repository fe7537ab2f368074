"""Anchors and outer momenta between two syncs: on the device, in host memory, or in bfloat16.

Between syncs nobody reads them, so that they need not take eight bytes a parameter of a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.types import State, mix

Anchors: TypeAlias = Literal["device", "host", "bf16"]
"""Place and format of anchors and outer momenta.

device: float32 beside the parameters. host: float32 in pinned host memory, with the same results;
every tensor is copied to the device and back at a sync. bf16: half the memory; after an outer step
anchors and momenta are rounded up or down at random, by numbers that are equal on all workers, so
that rounding has no drift of its own. Parameters continue from the rounded anchor.
"""

_SALT = 0xA2C4
"""Keeps the random numbers of rounding apart from those of the compressor."""


@dataclass(frozen=True)
class AnchorStore:
    """Keeps the anchors and momenta of a fragment as `kind` demands."""

    kind: Anchors

    def check(self, method: str) -> None:
        known = [*get_args(Anchors)]
        if self.kind not in known:
            raise ConfigError(f"{method}: anchors must be one of {known}, got {self.kind!r}")

    def kept(self, values: State) -> State:
        """Returns the form in which float32 tensors of the device are kept."""
        if self.kind == "device":
            return values
        if self.kind == "bf16":
            return {name: value.to(torch.bfloat16) for name, value in values.items()}
        return {name: _host_copy(value) for name, value in values.items()}

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the parameters whose anchors are on the device together at a sync."""
        return [[*names]] if self.kind == "device" else [[name] for name in names]

    def load(self, kept: State, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """Returns tensors as float32 on the device: themselves if they are kept so, else copies."""
        return [kept[name].to(device, torch.float32) for name in names if name in kept]

    def save(
        self,
        values: Sequence[Tensor],
        kept: State,
        names: Sequence[str],
        lanes: Mapping[str, Lane],
        word: int,
    ) -> None:
        """Keeps what `load` returned and a sync has changed; `word` differs between kinds."""
        if self.kind == "device":
            return
        for value, name in zip(values, (name for name in names if name in kept), strict=True):
            if self.kind == "host":
                kept[name].copy_(value)
                continue
            ctx, device = lanes[name].ctx, value.device
            key = ctx._replace(seed=mix(ctx.seed, _SALT, word)).shared_key()
            uniform = kernels.on(device).uniform(key, value.numel(), device)
            kept[name].copy_(stochastically_rounded(value, uniform))


def stochastically_rounded(x: Tensor, uniform: Tensor) -> Tensor:
    """Returns float32 `x` rounded to numbers of bfloat16, whose mean over `uniform` is x.

    The upper half of a float32's bits is a bfloat16; adding a random lower half carries into it
    with the probability that the lower half stands for. Infinity stays.
    """
    random_half = (uniform * 65536).to(torch.int32)
    bits = (x.view(torch.int32) + random_half) & -65536
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def _host_copy(value: Tensor) -> Tensor:
    """Returns a copy in host memory, pinned if the tensor is on a GPU."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value)
