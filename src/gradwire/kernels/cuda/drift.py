"""Drift of parameters from a base (definition: kernels/reference/drift.py).

Everything is read and written once, where torch takes 10 passes to capture the drift and 16 to
apply the mean. There is one launch per parameter, so small parameters are left to torch, which
batches them.
"""

import triton
import triton.language as tl

from gradwire.kernels.reference import drift as reference_drift
from gradwire.kernels.specs import DriftTensors

BLOCK = 2048
LARGE = 1 << 20
"""From this many entries on, a pass over memory takes longer than a launch."""


@triton.jit
def _drift_kernel(
    here_ptr, base_ptr, anchor_ptr, drift_ptr, rate, back, numel, APPLY: tl.constexpr,
    CAPTURE: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    param_dtype = here_ptr.dtype.element_ty
    here = tl.load(here_ptr + index, mask=inside, other=0.0).to(tl.float32)
    base = tl.load(base_ptr + index, mask=inside, other=0.0)
    if APPLY:
        anchor = tl.load(anchor_ptr + index, mask=inside, other=0.0)
        mean = tl.load(drift_ptr + index, mask=inside, other=0.0)
        # Rounded once, like torch's addition on CUDA.
        anchor = tl.fma(mean, -rate, anchor)
        local_drift = here - base
        here = (anchor + local_drift).to(param_dtype).to(tl.float32)
        base = here - local_drift
        tl.store(anchor_ptr + index, anchor, mask=inside)
    if CAPTURE:
        drift = base - here
        if BACK:
            here = tl.fma(drift, back, here).to(param_dtype).to(tl.float32)
        base = here
        tl.store(drift_ptr + index, drift, mask=inside)
    if APPLY or BACK:
        tl.store(here_ptr + index, here.to(param_dtype), mask=inside)
    tl.store(base_ptr + index, base, mask=inside)


def capture_drift(drifts: DriftTensors, lookahead: float) -> None:
    large, small = _by_size(drifts)
    _launch(large, None, lookahead)
    if small.params:
        reference_drift.capture_drift(small, lookahead)


def apply_outer_mean(drifts: DriftTensors, rate: float) -> None:
    large, small = _by_size(drifts)
    _launch(large, rate, None)
    if small.params:
        reference_drift.apply_outer_mean(small, rate)


def apply_and_capture(drifts: DriftTensors, rate: float, lookahead: float) -> None:
    large, small = _by_size(drifts)
    _launch(large, rate, lookahead)
    if small.params:
        reference_drift.apply_and_capture(small, rate, lookahead)


def _by_size(drifts: DriftTensors) -> tuple[DriftTensors, DriftTensors]:
    """Splits into large and small parameters."""
    large = DriftTensors(
        *([tensor for tensor in tensors if tensor.numel() >= LARGE] for tensors in drifts)
    )
    return large, DriftTensors(
        *([tensor for tensor in tensors if tensor.numel() < LARGE] for tensors in drifts)
    )


def _launch(drifts: DriftTensors, rate: float | None, lookahead: float | None) -> None:
    """Applies the mean if `rate` is given, and captures the drift if `lookahead` is given."""
    back = 0.0 if lookahead is None else 1 - lookahead
    for here, *others in zip(*drifts, strict=True):
        _drift_kernel[(-(-here.numel() // BLOCK),)](
            here, *others, rate or 0.0, back, here.numel(), APPLY=rate is not None,
            CAPTURE=lookahead is not None, BACK=back > 0, BLOCK=BLOCK,
        )  # fmt: skip
