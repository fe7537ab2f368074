"""Drift of parameters from a base (definition: kernels/reference/drift.py).

Everything is read and written once, where torch takes 10 passes to capture the drift and 16 to
apply the mean. There is one launch per parameter, so small parameters are left to torch, which
batches them.
"""

import triton
import triton.language as tl

from gradwire.kernels.reference import drift as by_torch
from gradwire.kernels.specs import Drifted

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


def depart(drifted: Drifted, ahead: float) -> None:
    large, small = _by_size(drifted)
    _launch(large, None, ahead)
    if small.here:
        by_torch.depart(small, ahead)


def arrive(drifted: Drifted, rate: float) -> None:
    large, small = _by_size(drifted)
    _launch(large, rate, None)
    if small.here:
        by_torch.arrive(small, rate)


def relay(drifted: Drifted, rate: float, ahead: float) -> None:
    large, small = _by_size(drifted)
    _launch(large, rate, ahead)
    if small.here:
        by_torch.relay(small, rate, ahead)


def _by_size(drifted: Drifted) -> tuple[Drifted, Drifted]:
    """Large parameters and small ones."""
    large = Drifted(*([one for one in some if one.numel() >= LARGE] for some in drifted))
    return large, Drifted(*([one for one in some if one.numel() < LARGE] for some in drifted))


def _launch(drifted: Drifted, rate: float | None, ahead: float | None) -> None:
    """Arrives if there is a rate, and departs if there is a share to be ahead by."""
    back = 0.0 if ahead is None else 1 - ahead
    for here, *others in zip(*drifted, strict=True):
        _drift_kernel[(-(-here.numel() // BLOCK),)](
            here, *others, rate or 0.0, back, here.numel(), ARRIVE=rate is not None,
            DEPART=ahead is not None, BACK=back > 0, BLOCK=BLOCK,
        )  # fmt: skip
