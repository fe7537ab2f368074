"""Bits on the wire against the fewest that would do, for every method of the folder.

Dense quantisers: within 1.05 of the width of their codes plus their scales. Methods that choose
entries: within 1.4 of the entropy of the choice plus the values in their format. Not measured here:
low-rank factors, which are plain floats, and count sketches, which have no positions to tell.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import pytest
import torch
from few_ranks import bits_an_element, normal
from torch import Tensor

from gradwire.base import Compressor
from gradwire.compressors._sparsifier import FORMATS, Sparsifier
from gradwire.compressors.adaq import AdaQ
from gradwire.compressors.dct import DCT
from gradwire.compressors.inceptionn import Inceptionn
from gradwire.compressors.int4 import SCALES
from gradwire.compressors.variance import Variance
from gradwire.compressors.wangni import Wangni
from gradwire.spec import compressor_classes, name_of

NUMEL = 1_000_000
RATIOS = [0.1, 0.01, 0.001]


def tags_and_codes(c: Inceptionn, x: Tensor) -> float:
    """Two bits, and nothing, 8, 16 or 32 more by magnitude."""
    k, m = c.borders()
    shares = [float((x.abs() >= border).float().mean()) for border in (2.0**-k, 2.0**-m, 1.0)]
    return 2 + 8 * shares[0] + 8 * shares[1] + 16 * shares[2]


IDEAL: Mapping[str, Callable[..., float]] = {
    "bf16": lambda c, x: 16,
    "codebook": lambda c, x: c.bits,
    "eden": lambda c, x: c.bits + 32 / c.block,
    "efsign": lambda c, x: 1,
    "eightbit": lambda c, x: 8 + 32 / c.bucket,
    "fp16": lambda c, x: 16,
    "fp8": lambda c, x: 8 + 32 / c.bucket,
    "inceptionn": tags_and_codes,
    "int4": lambda c, x: 4 + 8 * SCALES[c.scale].itemsize / c.block,
    "natural": lambda c, x: 8,
    "onebit": lambda c, x: 1 + (64 / c.bucket if c.bucket else 0),
    "qsgd": lambda c, x: c.bits + 32 / c.bucket,
    "sign": lambda c, x: 1,
    "signsgd": lambda c, x: 1,
    "signum": lambda c, x: 1,
    "sketchml": lambda c, x: c.bits,
    "terngrad": lambda c, x: math.log2(3),
    "threelc": lambda c, x: math.log2(3),
}
"""The fewest bits an entry for what a dense quantiser says, scales included."""


def quantisers() -> list[Compressor]:
    classes = [cls for cls in compressor_classes().values() if cls.family == "quantisation"]
    return [cls(**example) for cls in classes for example in cls.examples]


def test_every_quantiser_has_an_ideal() -> None:
    assert {name_of(c) for c in quantisers()} == set(IDEAL)


@pytest.mark.parametrize("codec", quantisers(), ids=str)
def test_dense_quantisers(codec: Compressor) -> None:
    x = normal(NUMEL)
    assert bits_an_element(codec, x) <= 1.05 * IDEAL[name_of(codec)](codec, x)


def choices(numel: int, count: int) -> float:
    """Bits that tell `count` of `numel`: log2 of the binomial coefficient."""
    ways = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return ways / math.log(2)


def sparsifiers() -> list[type[Sparsifier]]:
    return [cls for cls in compressor_classes().values() if issubclass(cls, Sparsifier)]


def test_every_sparsifier_is_measured() -> None:
    """Here, below, or in a format that has no positions (see above)."""
    others = {cls for cls in compressor_classes().values() if cls.family == "sparsification"}
    assert {cls.__name__ for cls in others - set(sparsifiers())} == {
        "DCT",
        "SketchedSGD",
        "Variance",
        "Wangni",
    }


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("cls", sparsifiers(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("values", ["bf16", "fp32"])
def test_sparsifiers(cls: type[Sparsifier], ratio: float, values: str) -> None:
    x = normal(NUMEL)
    # Those without a ratio have so many of a chunk, or a threshold.
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    border = float(x.abs().kthvalue(round(NUMEL * (1 - ratio))).values)
    by_chunk = {"k": round(1000 * ratio), "chunk": 1000}
    by_border = by_chunk if "chunk" in names else {"value": border}
    codec = cls(**({"ratio": ratio} if "ratio" in names else by_border))
    payload = replace(codec, values=values).encode(x)
    count = round(payload.parts[-1].numel())
    assert ratio * NUMEL / 2 < count < 2.5 * ratio * NUMEL
    width = 8 * FORMATS[values].layout(1).fields[0].dtype.itemsize
    ideal = (choices(NUMEL, count) if cls.sends_indices else 0) + width * count
    assert 8 * payload.nbytes <= 1.4 * ideal


@pytest.mark.parametrize("ratio", RATIOS)
def test_signs_at_positions(ratio: float) -> None:
    payload = AdaQ(ratio=ratio).encode(normal(NUMEL))
    count = round(ratio * NUMEL)
    assert 8 * payload.nbytes <= 1.4 * (choices(NUMEL, count) + count + 64)


@pytest.mark.parametrize("ratio", RATIOS)
def test_large_and_small_entries_apart(ratio: float) -> None:
    payload = Wangni(ratio=ratio).encode(normal(NUMEL))
    large, small = payload.parts[0].tolist()
    told = choices(NUMEL, large + small) + choices(large + small, small)
    assert large + small == pytest.approx(ratio * NUMEL, rel=0.1)
    assert 8 * payload.nbytes <= 1.4 * (told + 32 * large + small)


@pytest.mark.parametrize(("chunk", "k"), [(64, 6), (64, 1), (1024, 1)])
def test_coefficients_of_chunks(chunk: int, k: int) -> None:
    payload = DCT(chunk=chunk, k=k).encode(normal(NUMEL))
    chunks = NUMEL / chunk
    assert 8 * payload.nbytes <= 1.4 * chunks * (choices(chunk, k) + 16 * k)


@pytest.mark.parametrize("ratio", RATIOS)
def test_entries_that_stand_out(ratio: float) -> None:
    x = torch.where(torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) < ratio, 1.0, 0.0)
    payload = Variance().encode(x)
    count = int(payload.parts[0])
    assert count == x.count_nonzero()
    assert 8 * payload.nbytes <= 1.4 * (choices(NUMEL, count) + 16 * count)
