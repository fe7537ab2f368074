"""Bits on the wire against the fewest possible, for every method of the folder.

A method's own test defines `ideal_bits(codec, x)`, the fewest bits per entry. Quantisers stay
within 1.05 of it, methods that select entries within 1.4 of the entropy of the selection plus the
values in their format; for subclasses of `Sparsifier` the ideal is here. Not measured: low-rank
factors, which are plain floats.
"""

from dataclasses import fields, replace
from importlib import import_module

import pytest
from few_ranks import bits_per_entry, normal, selection_bits

from gradwire.base import Compressor
from gradwire.compressors._sparsifier import VALUE_DTYPES, Sparsifier
from gradwire.spec import compressor_classes, name_of

NUMEL = 1_000_000
RATIOS = [0.1, 0.01, 0.001]
SLACK = {"quantisation": 1.05, "sparsification": 1.4, "hybrid": 1.4}


def measured_methods() -> list[Compressor]:
    """Returns every setting of the methods whose own test defines the ideal."""
    classes = [cls for cls in compressor_classes().values() if cls.family in SLACK]
    return [
        cls(**example)
        for cls in classes
        if not issubclass(cls, Sparsifier)
        for example in cls.examples
    ]


@pytest.mark.parametrize("codec", measured_methods(), ids=str)
def test_messages_are_near_the_ideal_of_their_own_test(codec: Compressor) -> None:
    own = import_module(f"test_{name_of(codec).replace('-', '_')}")
    x = normal(NUMEL)
    assert bits_per_entry(codec, x) <= SLACK[codec.family] * own.ideal_bits(codec, x)


def sparsifiers() -> list[type[Sparsifier]]:
    return [cls for cls in compressor_classes().values() if issubclass(cls, Sparsifier)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("cls", sparsifiers(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("values", ["bf16", "fp32"])
def test_sparsifiers_are_near_the_entropy(cls: type[Sparsifier], ratio: float, values: str) -> None:
    x = normal(NUMEL)
    threshold = float(x.abs().kthvalue(round(NUMEL * (1 - ratio))).values)
    knobs = {"ratio": ratio, "k": round(1000 * ratio), "chunk": 1000, "value": threshold}
    settings = {f.name: knobs[f.name] for f in fields(cls) if f.name in knobs}  # type: ignore[arg-type]
    codec = cls(**(settings or cls.examples[0]))
    payload = replace(codec, values=values).encode(x)
    count = round(payload.parts[-1].numel())
    expected = ratio * NUMEL if settings else codec.count(NUMEL)
    assert expected / 2 < count < 2.5 * expected
    width = 8 * VALUE_DTYPES[values].itemsize
    ideal = (selection_bits(NUMEL, count) if cls.sends_indices else 0) + width * count
    assert 8 * payload.nbytes <= 1.4 * ideal
