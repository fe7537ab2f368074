"""The bound on the rounding error of an entry that every quantizer states."""

import pytest
import torch
from few_ranks import eighths, normal, roundtrip, with_entry

from gradwire.compressors._quantizer import Quantizer
from gradwire.spec import compressor_classes, format_spec

QUANTISERS = [
    cls(**example)  # type: ignore[call-arg]
    for cls in compressor_classes().values()
    if issubclass(cls, Quantizer)
    for example in cls.examples
]


@pytest.mark.parametrize("codec", QUANTISERS, ids=format_spec)
def test_no_entry_is_off_by_more_than_the_bound(codec: Quantizer) -> None:
    spec = codec.rounding_spec()
    one_large = with_entry(torch.full((2000,), 0.011), 0, 1.0)
    for x in (normal(2000), normal(2000) ** 5, eighths(2000), one_large, torch.ones(2000)):
        largest = torch.stack([part.abs().max() for part in x.split(spec.bucket)])
        off = (roundtrip(codec, x) - x).abs() / largest.repeat_interleave(spec.bucket)[:2000]
        assert off.max() <= spec.largest_error * (1 + 1e-5)
