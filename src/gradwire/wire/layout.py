"""Packing of messages into one byte buffer, and views of the same part of many messages.

A buffer begins with the int32 lengths that only the sender knows. The parts follow, in order, each
padded with zeros to a multiple of 4 bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.types import Field, Layout, Parts

ALIGN = 4

Fields: TypeAlias = tuple[tuple[Field, ...], ...]


def align(nbytes: int) -> int:
    """Rounds up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


class _Slot(NamedTuple):
    """The bytes of one part in a buffer: it is at start:stop, and padding ends at `end`."""

    field: Field
    start: int
    stop: int
    end: int


class _Placement(NamedTuple):
    """The offsets of all parts of all messages in a buffer."""

    variable: int
    """Number of fields whose length is in the buffer."""
    nbytes: int
    slots: tuple[tuple[_Slot, ...], ...]  # [messages][fields]


def _place(fields: Fields, lengths: Sequence[int]) -> _Placement:
    """Computes the offsets, given the lengths of the variable fields in order."""
    remaining = iter(lengths)
    offset = ALIGN * len(lengths)
    slots = []
    for message in fields:
        row = []
        for field in message:
            count = next(remaining) if field.numel is None else field.numel
            stop = offset + count * field.dtype.itemsize
            end = align(stop)
            row.append(_Slot(field, offset, stop, end))
            offset = end
        slots.append(tuple(row))
    return _Placement(len(lengths), offset, tuple(slots))


# Cached by fields, since a layout is made anew for every message and its check may be a closure.
@lru_cache(maxsize=1024)
def _place_empty(fields: Fields) -> _Placement:
    """Computes the offsets with variable lengths of 0; without variable fields, those of all."""
    return _place(fields, [0 for message in fields for field in message if field.numel is None])


def _fields(layouts: Sequence[Layout]) -> Fields:
    return tuple([layout.fields for layout in layouts])


def count_variable(layouts: Sequence[Layout]) -> int:
    """Returns the number of fields whose length must be sent."""
    return _place_empty(_fields(layouts)).variable


def max_bytes(numel: int) -> int:
    """Returns the bound of a message about `numel` entries: twice their float32, and tables.

    A receiver knows it in advance, so no sender can make it wait for more, or allocate more.
    """
    return 8 * numel + 4096


def max_packed_bytes(layouts: Sequence[Layout]) -> int:
    """Returns the most bytes that a buffer of these messages may take."""
    total = 0
    for layout in layouts:
        placement = _place_empty((layout.fields,))
        most = layout.max_bytes if placement.variable else placement.nbytes
        assert most is not None, "a layout with variable lengths must have max_bytes"
        total += most
    return total


def packed_bytes(messages: Sequence[Parts] | None, layouts: Sequence[Layout]) -> int:
    """Returns the length of packed messages; without messages, variable lengths count as 0."""
    placement = _place_empty(_fields(layouts))
    if messages is None:
        return placement.nbytes
    total = ALIGN * placement.variable
    for number, layout in enumerate(layouts):
        for place, field in enumerate(layout.fields):
            total += align(messages[number][place].numel() * field.dtype.itemsize)
    return total


def pack(messages: Sequence[Parts], layouts: Sequence[Layout]) -> Tensor:
    """Packs all messages into one uint8 tensor."""
    fields = _fields(layouts)
    placement, lengths = _place_empty(fields), []
    if placement.variable:
        lengths = [
            part.numel()
            for message, row in zip(messages, fields, strict=True)
            for part, field in zip(message, row, strict=True)
            if field.numel is None
        ]
        placement = _place(fields, lengths)
    buffer = torch.empty(placement.nbytes, dtype=torch.uint8, device=messages[0][0].device)
    if lengths:
        buffer[: ALIGN * len(lengths)] = torch.tensor(lengths, dtype=torch.int32).view(torch.uint8)
    for message, slots in zip(messages, placement.slots, strict=True):
        for part, (field, start, stop, end) in zip(message, slots, strict=True):
            assert part.dtype == field.dtype, f"{part.dtype} in a field of {field.dtype}"
            count = part.numel()
            assert field.numel in (None, count), f"{count} in a field of {field.numel}"
            buffer[start:stop] = part.view(torch.uint8)
            if stop < end:
                # Same seed, same bytes: padding is part of the message.
                buffer[stop:end] = 0
    return buffer


def unpack(buffer: Tensor, layouts: Sequence[Layout]) -> list[Parts]:
    """Returns the messages as views of the buffer; raises WireError unless each is valid."""
    fields = _fields(layouts)
    placement = _place_empty(fields)
    if placement.variable:
        placement = _place(fields, _lengths(buffer, placement.variable))
    if buffer.numel() != placement.nbytes:
        raise WireError(f"message of {buffer.numel()} bytes where {placement.nbytes} were agreed")
    messages: list[Parts] = [
        tuple([_typed(buffer[slot.start : slot.stop], slot.field.dtype) for slot in slots])
        for slots in placement.slots
    ]
    for layout, parts in zip(layouts, messages, strict=True):
        if layout.check is not None:
            layout.check(parts)
    return messages


def check_parts(parts: Parts, layout: Layout) -> None:
    """Raises WireError unless these are a message of this layout that can be decoded safely."""
    found = [(part.dtype, *part.shape) for part in parts]
    wanted = [(field.dtype, field.numel) for field in layout.fields]
    if len(found) != len(wanted) or any(
        part.dim() != 1 or part.dtype != field.dtype or field.numel not in (None, part.numel())
        for part, field in zip(parts, layout.fields, strict=True)
    ):
        raise WireError(
            f"message has parts {found}, expected {wanted}: from another method, or truncated"
        )
    if layout.check is not None:
        layout.check(parts)


def _lengths(buffer: Tensor, count: int) -> list[int]:
    """Reads the lengths of the variable fields."""
    head = ALIGN * count
    if buffer.numel() < head:
        raise WireError(f"message of {buffer.numel()} bytes is too short for its {head}-byte head")
    lengths: list[int] = _typed(buffer[:head], torch.int32).tolist()
    if any(length < 0 for length in lengths):
        raise WireError(f"message with a negative length: {min(lengths)}")
    return lengths


def _typed(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    # Only float64 can be misaligned in a buffer of its own: parts are padded to 4 bytes.
    if chunk.storage_offset() % dtype.itemsize or not chunk.numel():
        chunk = chunk.clone()
    return chunk.view(dtype)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all tensors as one flat tensor of their widest type; a view if they are adjacent."""
    first = tensors[0]
    dtype = first.dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if adjacent(tensors):
        return first.as_strided((sum(t.numel() for t in tensors),), (1,))
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Splits what `join` made, into the types and shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [p.to(t.dtype).view(t.shape) for p, t in zip(pieces, like, strict=True)]


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Returns whether the tensors are adjacent in one storage, as the gradients of a bucket are."""
    if not tensors:
        return False
    first = tensors[0]
    storage, dtype, place = first.untyped_storage().data_ptr(), first.dtype, first.storage_offset()
    for tensor in tensors:
        if (
            tensor.dtype != dtype
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != place
            or not tensor.is_contiguous()
        ):
            return False
        place += tensor.numel()
    return True


def as_rows(parts: Sequence[Tensor]) -> Tensor:
    """Returns flat parts of one length and type as the rows of a matrix.

    It is a view if they are equally spaced, as messages that were gathered into one buffer are.
    """
    first = parts[0]
    distance = int(parts[min(1, len(parts) - 1)].storage_offset() - first.storage_offset())
    if first.is_contiguous() and distance >= 0 and _at_distance(parts, distance):
        return first.as_strided((len(parts), first.numel()), (distance, 1))
    return torch.stack(list(parts))


def _at_distance(parts: Sequence[Tensor], distance: int) -> bool:
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != place:
            return False
        place += distance
    return True
