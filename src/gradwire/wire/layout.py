"""The same part of many messages as the rows of one matrix, so that a kernel can read them all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.types import Field, Layout, Parts

ALIGN = 4


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def secrets(layouts: Sequence[Layout]) -> int:
    """How many lengths must travel."""
    return sum(field.numel is None for layout in layouts for field in layout.fields)


def max_bytes(numel: int) -> int:
    """No message about `numel` entries is longer: twice their float32, and room for tables.

    A receiver knows it before a byte has come, so no sender makes it wait for more, or hold more.
    """
    return 8 * numel + 4096


def longest(layouts: Sequence[Layout]) -> int:
    """The most bytes that a buffer of these messages may take."""
    total = 0
    for layout in layouts:
        most = layout.max_bytes if secrets([layout]) else packed_bytes(None, [layout])
        assert most is not None, "a layout with secret lengths must say the most that it takes"
        total += most
    return total


def packed_bytes(messages: Sequence[Parts] | None, layouts: Sequence[Layout]) -> int:
    """Length of the packed messages; without messages, secret lengths count as 0."""
    total = ALIGN * secrets(layouts)
    for number, layout in enumerate(layouts):
        for place, field in enumerate(layout.fields):
            count = field.numel or 0 if messages is None else messages[number][place].numel()
            total += padded(count * field.dtype.itemsize)
    return total


def pack(messages: Sequence[Parts], layouts: Sequence[Layout]) -> Tensor:
    """All messages as one uint8 tensor."""
    device = messages[0][0].device
    buffer = torch.empty(packed_bytes(messages, layouts), dtype=torch.uint8, device=device)
    offset = 0
    if secrets(layouts):
        lengths = [
            part.numel()
            for message, layout in zip(messages, layouts, strict=True)
            for part, field in zip(message, layout.fields, strict=True)
            if field.numel is None
        ]
        head = torch.tensor(lengths, dtype=torch.int32).view(torch.uint8)
        buffer[: head.numel()] = head
        offset = head.numel()
    for message, layout in zip(messages, layouts, strict=True):
        for part, field in zip(message, layout.fields, strict=True):
            offset = _write(buffer, offset, part, field)
    return buffer


def _write(buffer: Tensor, offset: int, part: Tensor, field: Field) -> int:
    assert part.dtype == field.dtype, f"{part.dtype} in a field of {field.dtype}"
    assert field.numel in (None, part.numel()), f"{part.numel()} in a field of {field.numel}"
    stop = offset + part.numel() * field.dtype.itemsize
    buffer[offset:stop] = part.view(torch.uint8)
    end = padded(stop)
    # Same seed, same bytes: padding is part of the message.
    buffer[stop:end] = 0
    return end


def unpack(buffer: Tensor, layouts: Sequence[Layout]) -> list[Parts]:
    """The messages again, as views of the buffer, each checked."""
    lengths = _lengths(buffer, layouts)
    offset = ALIGN * len(lengths)
    expected = offset + sum(
        padded((lengths[key] if field.numel is None else field.numel) * field.dtype.itemsize)
        for key, field in _fields(layouts)
    )
    if buffer.numel() != expected:
        raise WireError(f"message of {buffer.numel()} bytes where {expected} were agreed")
    messages: list[list[Tensor]] = [[] for _ in layouts]
    for key, field in _fields(layouts):
        count = lengths[key] if field.numel is None else field.numel
        nbytes = count * field.dtype.itemsize
        part = _typed(buffer[offset : offset + nbytes], field.dtype)
        messages[key[0]].append(part)
        offset += padded(nbytes)
    answers = [tuple(parts) for parts in messages]
    for layout, parts in zip(layouts, answers, strict=True):
        if layout.check is not None:
            layout.check(parts)
    return answers


def check_parts(parts: Parts, layout: Layout) -> None:
    """Raises WireError unless these are a message of this layout that can be decoded safely."""
    found = [(part.dtype, *part.shape) for part in parts]
    wanted = [(field.dtype, field.numel) for field in layout.fields]
    if len(found) != len(wanted) or any(
        part.dim() != 1 or part.dtype != field.dtype or field.numel not in (None, part.numel())
        for part, field in zip(parts, layout.fields, strict=True)
    ):
        raise WireError(f"message has parts {found}, expected {wanted}: another method's, or cut")
    if layout.check is not None:
        layout.check(parts)


def _fields(layouts: Sequence[Layout]) -> list[tuple[tuple[int, int], Field]]:
    return [
        ((i, j), field) for i, layout in enumerate(layouts) for j, field in enumerate(layout.fields)
    ]


def _lengths(buffer: Tensor, layouts: Sequence[Layout]) -> dict[tuple[int, int], int]:
    keys = [key for key, field in _fields(layouts) if field.numel is None]
    head = ALIGN * len(keys)
    if buffer.numel() < head:
        raise WireError(f"message of {buffer.numel()} bytes is too short for its {head}-byte head")
    counts = _typed(buffer[:head], torch.int32).tolist() if keys else []
    if any(count < 0 for count in counts):
        raise WireError(f"message with a negative length: {min(counts)}")
    return dict(zip(keys, counts, strict=True))


def _typed(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    # Only float64 can lie at an odd place: fields are padded to 4 bytes.
    if chunk.storage_offset() % dtype.itemsize or not chunk.numel():
        chunk = chunk.clone()
    return chunk.view(dtype)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one flat tensor of their widest type; in place where they already are one."""
    first = tensors[0]
    dtype = first.dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if adjacent(tensors):
        return first.as_strided((sum(t.numel() for t in tensors),), (1,))
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `join`, in the types and shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [p.to(t.dtype).view(t.shape) for p, t in zip(pieces, like, strict=True)]


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors lie side by side in one storage, as the gradients of a bucket do."""
    if not tensors:
        return False
    here = tensors[0]
    storage, dtype, place = here.untyped_storage().data_ptr(), here.dtype, here.storage_offset()
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
    """Flat parts of one length and type, one a row.

    A view where they lie at even distances, as messages that were gathered into one buffer do.
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
