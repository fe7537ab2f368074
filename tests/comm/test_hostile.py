"""Lengths and settings that another rank tells are not believed before they are checked."""

import hostile_jobs as jobs
import pytest
import torch

from gradwire.base import OneRound
from gradwire.compressors._sparsifier import FORMATS
from gradwire.spec import compressor_classes
from gradwire.types import EncodeContext, Field, Layout
from gradwire.wire.layout import longest, max_bytes, pack, packed_bytes, secrets
from processes import Ranks


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("size", [65, 2**31 - 1, 2**62, -1, -(2**63)])
def test_a_hostile_length_is_refused_before_room_is_made(
    four_ranks: Ranks, kind: str, size: int
) -> None:
    *honest, _ = four_ranks.run(jobs.hostile_size_job, kind, size)
    expected = f"WireError: rank 3 announces {size} bytes where 64 is the most"
    assert honest == [expected] * 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfe{", "rank 3 tells settings that cannot be read"),
        (b"[" * 100_000, "rank 3 tells settings that cannot be read"),
        (b"[1, 2]", "rank 3 tells settings that are a list"),
    ],
    ids=["no text", "too deep", "a list"],
)
def test_settings_that_are_none(four_ranks: Ranks, text: bytes, expected: str) -> None:
    *honest, _ = four_ranks.run(jobs.hostile_settings_job, text)
    assert all(answer.startswith(f"WireError: {expected}") for answer in honest)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 4095])
def test_no_honest_message_is_longer_than_the_most(numel: int) -> None:
    """Of any method alone, and of what a sparsifier that says all would pass on to it."""
    told = [method(**e) for method in compressor_classes().values() for e in method.examples]
    codecs = [codec for codec in told if isinstance(codec, OneRound)]
    assert len(codecs) > 30
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for codec in [*codecs, *FORMATS.values()]:
        layout = codec.layout(numel)
        buffer = pack([codec.compress(x, EncodeContext((numel,)))], [layout])
        assert buffer.numel() <= longest([layout])
        if secrets([layout]):
            assert longest([layout]) == max_bytes(numel)
        else:
            assert longest([layout]) == packed_bytes(None, [layout])
        # All positions beside all values.
        assert buffer.numel() + numel // 4 + 16 <= max_bytes(numel)


def test_a_layout_with_secrets_must_say_the_most() -> None:
    with pytest.raises(AssertionError, match="must say the most"):
        longest([Layout((Field(torch.uint8, None),))])
