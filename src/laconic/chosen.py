"""Messages about chosen entries, whatever has chosen them: their layout, and what their values say.

A `codec` writes the values; who wrote or reads the positions is in `sparse`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.cast import Cast
from laconic.contract import OneRound
from laconic.errors import WireError
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.indices import check_index, index_field
from laconic.wire.layout import most_bytes


def counted_layout(codec: OneRound, numel: int, count: int) -> Layout:
    """Of a message about `count` entries of `numel`: their positions, then their values."""
    inner = codec.layout(count)

    def check(parts: Parts) -> None:
        check_index(parts[0], numel, count)
        if inner.check is not None:
            inner.check(parts[1:])

    return Layout((index_field(numel, count), *inner.fields), check, most_bytes(numel))


def varying_layout(codec: OneRound, numel: int) -> Layout:
    """The number of entries first; all lengths follow from it, and are checked against it."""

    def check(parts: Parts) -> None:
        count = int(parts[0])
        if not 0 <= count <= numel:
            raise WireError(f"message tells {count} entries of a tensor of {numel}")
        inner = codec.layout(count)
        fields = (index_field(numel, count), *inner.fields)
        for part, field in zip(parts[1:], fields, strict=True):
            if field.numel is not None and part.numel() != field.numel:
                raise WireError(
                    f"message has a part of {part.numel()} where {count} entries take {field.numel}"
                )
        check_index(parts[1], numel, count)
        if inner.check is not None:
            inner.check(parts[2:])

    secret = [Field(field.dtype, None) for field in codec.layout(0).fields]
    fields = (Field(torch.int32, 1), Field(torch.uint8, None), *secret)
    return Layout(fields, check, most_bytes(numel))


def said_of(
    codec: OneRound, messages: Sequence[Parts], count: int, weight: float, turn: Turn
) -> tuple[Tensor, float]:
    """What each message says of its `count` entries, and the weight that they still have to get."""
    if isinstance(codec, Cast):
        return torch.stack([parts[0] for parts in messages]), weight
    rows = torch.zeros(len(messages), count, device=messages[0][0].device)
    for row, parts in zip(rows, messages, strict=True):
        codec.add_to(row, [parts], weight, turn._replace(shape=(count,)))
    return rows, 1.0


def each_said(
    codec: OneRound, messages: Sequence[tuple[Tensor, Parts]], weight: float, turn: Turn
) -> list[Tensor]:
    """The same for messages of their own lengths, each with its count."""
    if isinstance(codec, Cast):
        return [values for _, (values,) in messages]
    # Asked all at once, so that the host waits once.
    counts = torch.cat([count for count, _ in messages]).tolist()
    rows = [
        said_of(codec, [parts], count, weight, turn)[0]
        for count, (_, parts) in zip(counts, messages, strict=True)
    ]
    return [row.view(-1) for row in rows]
