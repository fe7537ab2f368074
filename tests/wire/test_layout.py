"""Messages are packed to bytes and unpacked; invalid bytes are refused."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import WireError
from gradwire.types import Field, Layout, Parts
from gradwire.wire.layout import join, pack, packed_bytes, split, unpack

DTYPES = [
    torch.uint8,
    torch.int32,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
]
# The first example of a run includes the lazy loading of torch.
unhurried = settings(deadline=None)
VARIABLE = Layout((Field(torch.uint8, 3), Field(torch.float32, None)))


class Messages:
    """Messages with their layouts, made by hypothesis."""

    def __init__(self, lanes: list[list[tuple[torch.dtype, int, bool]]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layouts = [
            Layout(tuple(Field(dtype, None if variable else n) for dtype, n, variable in lane))
            for lane in lanes
        ]
        self.messages: list[Parts] = [
            tuple(any_bits(dtype, n, generator) for dtype, n, _ in lane) for lane in lanes
        ]

    def __repr__(self) -> str:
        return f"{self.layouts} with lengths {[[p.numel() for p in m] for m in self.messages]}"


def any_bits(dtype: torch.dtype, numel: int, generator: torch.Generator) -> Tensor:
    """Returns numbers with random bits, NaN included."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


part = st.tuples(st.sampled_from(DTYPES), st.integers(0, 9), st.booleans())
packets = st.builds(
    Messages,
    st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
)


def raw(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return values


def test_by_hand() -> None:
    message = (torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([1.0]))
    packed = pack([message], [VARIABLE])
    length, padded, one = [1, 0, 0, 0], [1, 2, 3, 0], [0, 0, 128, 63]
    assert packed.tolist() == length + padded + one


@unhurried
@given(packet=packets)
def test_round_trip(packet: Messages) -> None:
    packed = pack(packet.messages, packet.layouts)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(packet.messages, packet.layouts)
    answers = unpack(packed, packet.layouts)
    for message, answer in zip(packet.messages, answers, strict=True):
        for sent, received in zip(message, answer, strict=True):
            assert received.dtype == sent.dtype
            assert raw(received) == raw(sent)


@unhurried
@given(packet=packets, offset=st.integers(0, 9))
def test_a_message_may_be_anywhere_in_a_buffer(packet: Messages, offset: int) -> None:
    packed = pack(packet.messages, packet.layouts)
    buffer = torch.full((packed.numel() + 20,), 255, dtype=torch.uint8)
    view = buffer[offset : offset + packed.numel()]
    view.copy_(packed)
    for message, answer in zip(packet.messages, unpack(view, packet.layouts), strict=True):
        assert [raw(p) for p in answer] == [raw(p) for p in message]


@unhurried
@given(packet=packets)
def test_same_parts_same_bytes(packet: Messages) -> None:
    """Padding is part of the message, so uninitialized memory must not show."""
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = pack(packet.messages, packet.layouts)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(poisoned, pack(packet.messages, packet.layouts))


@unhurried
@given(packet=packets)
def test_lengths_known_beforehand(packet: Messages) -> None:
    nothing = [
        tuple(
            torch.empty(0, dtype=f.dtype) if f.numel is None else part
            for f, part in zip(layout.fields, message, strict=True)
        )
        for layout, message in zip(packet.layouts, packet.messages, strict=True)
    ]
    assert packed_bytes(None, packet.layouts) == pack(nothing, packet.layouts).numel()


@unhurried
@given(packet=packets, cut=st.integers(1, 64))
def test_a_shortened_message_is_refused(packet: Messages, cut: int) -> None:
    packed = pack(packet.messages, packet.layouts)
    if not packed.numel():
        return
    with pytest.raises(WireError):
        unpack(packed[: max(0, packed.numel() - cut)], packet.layouts)


@unhurried
@given(packet=packets, extra=st.integers(1, 64))
def test_a_lengthened_message_is_refused(packet: Messages, extra: int) -> None:
    packed = pack(packet.messages, packet.layouts)
    with pytest.raises(WireError):
        unpack(torch.cat([packed, packed.new_zeros(extra)]), packet.layouts)


@unhurried
@given(packet=packets, noise=st.binary(max_size=200))
def test_noise_is_a_message_or_refused(packet: Messages, noise: bytes) -> None:
    buffer = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        answers = unpack(buffer, packet.layouts)
    except WireError:
        return
    for layout, answer in zip(packet.layouts, answers, strict=True):
        for field, part in zip(layout.fields, answer, strict=True):
            assert part.dtype == field.dtype
            assert field.numel in (None, part.numel())


def message_of(length: int, body: int) -> Tensor:
    """Returns a message that claims `length` floats and has `body` bytes after its head."""
    head = torch.tensor([length], dtype=torch.int32).view(torch.uint8)
    return torch.cat([head, torch.zeros(body, dtype=torch.uint8)])


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(WireError, match="message with a negative length: -1"):
        unpack(message_of(-1, 8), [VARIABLE])


@pytest.mark.parametrize("length", [2, 1000, (1 << 31) - 1])
def test_a_length_beyond_the_message_is_refused(length: int) -> None:
    expected = 4 + 4 + 4 * length
    with pytest.raises(WireError, match=f"message of 12 bytes where {expected} were agreed"):
        unpack(message_of(length, 8), [VARIABLE])


def test_a_message_too_short_for_its_head_is_refused() -> None:
    with pytest.raises(WireError, match="message of 3 bytes is too short for its 8-byte head"):
        unpack(torch.zeros(3, dtype=torch.uint8), [VARIABLE, VARIABLE])


def test_a_wrong_length_is_refused() -> None:
    layout = Layout((Field(torch.float32, 2),))
    with pytest.raises(WireError, match="message of 12 bytes where 8 were agreed"):
        unpack(torch.zeros(12, dtype=torch.uint8), [layout])


def test_the_check_of_a_layout_is_called() -> None:
    def check(parts: Parts) -> None:
        if parts[0].sum() > 3:
            raise WireError("too much")

    layout = Layout((Field(torch.uint8, 4),), check)
    unpack(torch.zeros(4, dtype=torch.uint8), [layout])
    with pytest.raises(WireError, match="too much"):
        unpack(torch.ones(4, dtype=torch.uint8), [layout])


def test_adjacent_tensors_are_joined_in_place() -> None:
    bucket = torch.arange(12.0)
    views = [bucket[:4].view(2, 2), bucket[4:5], bucket[5:]]
    flat = join(views)
    assert flat.data_ptr() == bucket.data_ptr()
    assert torch.equal(flat, bucket)
    for piece, view in zip(split(flat, views), views, strict=True):
        assert piece.data_ptr() == view.data_ptr()
        assert piece.shape == view.shape


def test_adjacent_tensors_in_the_middle_of_a_bucket_are_joined_in_place() -> None:
    bucket = torch.arange(12.0)
    flat = join([bucket[3:5], bucket[5:9]])
    assert flat.data_ptr() == bucket[3:].data_ptr()
    assert torch.equal(flat, bucket[3:9])


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(lambda b: [b[4:8], b[:4]], id="wrong order"),
        pytest.param(lambda b: [b[:4], b[5:8]], id="gap"),
        pytest.param(lambda b: [b[:4], b.clone()[4:8]], id="another storage"),
        pytest.param(lambda b: [b[:4], b.view(4, 3).t()[:1]], id="strided"),
        pytest.param(lambda b: [b[:4], b[:0], b[4:]], id="nothing in between"),
    ],
)
def test_separate_tensors_are_copied(tensors: Callable[[Tensor], list[Tensor]]) -> None:
    bucket = torch.arange(12.0)
    pieces = tensors(bucket)
    flat = join(pieces)
    assert flat.tolist() == [v for p in pieces for v in p.reshape(-1).tolist()]
    flat.zero_()
    if len(pieces) == 2:
        assert torch.equal(bucket, torch.arange(12.0))


def test_mixed_types_are_promoted_and_restored() -> None:
    tensors = [
        torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16),
        torch.tensor([3.5], dtype=torch.float16),
        torch.tensor([0.1]),
    ]
    flat = join(tensors)
    assert flat.dtype == torch.float32
    for piece, tensor in zip(split(flat, tensors), tensors, strict=True):
        assert piece.dtype == tensor.dtype
        assert torch.equal(piece, tensor)


def test_half_precision_alone_is_kept() -> None:
    assert join([torch.zeros(2, dtype=torch.bfloat16)] * 2).dtype == torch.bfloat16
