"""Sizes and settings that another rank sends are checked before they are used."""

import hostile_jobs as jobs
import pytest
import torch

from gradwire.base import OneRound
from gradwire.spec import compressor_classes
from gradwire.types import EncodeContext, Field, Layout
from gradwire.wire.layout import count_variable, max_bytes, max_packed_bytes, pack, packed_bytes
from processes import Ranks


@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("size", [65, 2**31 - 1, 2**62, -1, -(2**63)])
def test_a_hostile_size_is_refused_before_memory_is_allocated(
    four_ranks: Ranks, kind: str, size: int
) -> None:
    *honest, _ = four_ranks.run(jobs.hostile_size_job, kind, size)
    expected = f"WireError: rank 3 announces {size} bytes where 64 is the most"
    assert honest == [expected] * 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfe{", "rank 3 sent settings that cannot be read"),
        (b"[" * 100_000, "rank 3 sent settings that cannot be read"),
        (b"[1, 2]", "rank 3 sent settings that are a list"),
    ],
    ids=["no text", "too deep", "a list"],
)
def test_malformed_settings_are_refused(four_ranks: Ranks, text: bytes, expected: str) -> None:
    *honest, _ = four_ranks.run(jobs.hostile_settings_job, text)
    assert all(answer.startswith(f"WireError: {expected}") for answer in honest)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 4095])
def test_no_honest_message_exceeds_the_size_limit(numel: int) -> None:
    """Checks every method alone, and as the value codec of a sparsifier that sends all entries."""
    methods = [method(**e) for method in compressor_classes().values() for e in method.examples]
    codecs = [method for method in methods if isinstance(method, OneRound)]
    assert len(codecs) > 30
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for codec in codecs:
        layout = codec.layout(numel)
        buffer = pack([codec.compress(x, EncodeContext((numel,)))], [layout])
        assert buffer.numel() <= max_packed_bytes([layout])
        if count_variable([layout]):
            assert max_packed_bytes([layout]) == max_bytes(numel)
        else:
            assert max_packed_bytes([layout]) == packed_bytes(None, [layout])
        # All positions beside all values.
        assert buffer.numel() + numel // 4 + 16 <= max_bytes(numel)


def test_a_layout_with_variable_lengths_must_have_a_limit() -> None:
    with pytest.raises(AssertionError, match="must have max_bytes"):
        max_packed_bytes([Layout((Field(torch.uint8, None),))])
