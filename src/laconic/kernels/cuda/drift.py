"""Parameters that have drifted from a base (the meaning: kernels/reference/drift.py).

Everything is read and written once, where torch takes 10 and 16 passes to depart and to arrive. It
takes a launch for each parameter, so many small ones are left to torch, which takes them together.
"""

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference import drift as by_torch

BLOCK = 2048
LARGE = 1 << 20
"""From so many entries on, a pass over memory takes longer than a launch."""


@triton.jit
def _drift_kernel(
    here_ptr, base_ptr, anchor_ptr, drift_ptr, rate, back, numel, ARRIVE: tl.constexpr,
    DEPART: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    own = here_ptr.dtype.element_ty
    here = tl.load(here_ptr + place, mask=inside, other=0.0).to(tl.float32)
    base = tl.load(base_ptr + place, mask=inside, other=0.0)
    if ARRIVE:
        anchor = tl.load(anchor_ptr + place, mask=inside, other=0.0)
        mean = tl.load(drift_ptr + place, mask=inside, other=0.0)
        # As torch adds on the card: rounded once.
        anchor = tl.fma(mean, -rate, anchor)
        since = here - base
        here = (anchor + since).to(own).to(tl.float32)
        base = here - since
        tl.store(anchor_ptr + place, anchor, mask=inside)
    if DEPART:
        drift = base - here
        if BACK:
            here = tl.fma(drift, back, here).to(own).to(tl.float32)
        base = here
        tl.store(drift_ptr + place, drift, mask=inside)
    if ARRIVE or BACK:
        tl.store(here_ptr + place, here.to(own), mask=inside)
    tl.store(base_ptr + place, base, mask=inside)


def depart(here: list[Tensor], base: list[Tensor], drift: list[Tensor], ahead: float) -> None:
    large, [hs, bs, ds] = _by_size(here, base, drift)
    for h, b, d in large:
        _launch(h, b, d, d, None, ahead)
    if hs:
        by_torch.depart(hs, bs, ds, ahead)


def arrive(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    mean: list[Tensor],
    rate: float,
) -> None:
    large, [hs, bs, as_, ms] = _by_size(here, base, anchor, mean)
    for h, b, a, m in large:
        _launch(h, b, a, m, rate, None)
    if hs:
        by_torch.arrive(hs, bs, as_, ms, rate)


def relay(
    here: list[Tensor],
    base: list[Tensor],
    anchor: list[Tensor],
    drift: list[Tensor],
    rate: float,
    ahead: float,
) -> None:
    large, [hs, bs, as_, ds] = _by_size(here, base, anchor, drift)
    for h, b, a, d in large:
        _launch(h, b, a, d, rate, ahead)
    if hs:
        by_torch.relay(hs, bs, as_, ds, rate, ahead)


def _by_size(*lists: list[Tensor]) -> tuple[list[tuple[Tensor, ...]], list[list[Tensor]]]:
    """What is about each large parameter, and the lists without them."""
    large = [row for row in zip(*lists, strict=True) if row[0].numel() >= LARGE]
    return large, [[one for one in some if one.numel() < LARGE] for some in lists]


def _launch(
    here: Tensor, base: Tensor, anchor: Tensor, drift: Tensor, rate: float | None,
    ahead: float | None,
) -> None:  # fmt: skip
    """Arrives if there is a rate, and departs if there is a share to be ahead by."""
    back = 0.0 if ahead is None else 1 - ahead
    _drift_kernel[(-(-here.numel() // BLOCK),)](
        here, base, anchor, drift, rate or 0.0, back, here.numel(), ARRIVE=rate is not None,
        DEPART=ahead is not None, BACK=back > 0, BLOCK=BLOCK,
    )  # fmt: skip
