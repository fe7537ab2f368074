"""Chunked top-k: the largest entries of every chunk and no others."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry

from gradwire.compressors.chunktopk import ChunkTopK, in_squares
from gradwire.errors import ConfigError
from gradwire.spec import parse
from gradwire.wire.indices import unpack_index


def test_keeps_the_largest_of_every_chunk() -> None:
    x = torch.tensor([1.0, -4.0, 2.0, 30.0, 40.0, -50.0, 0.1])
    index, values = ChunkTopK(k=1, chunk=3).encode(x).parts
    assert unpack_index(index, 7, 3).tolist() == [1, 5, 6]
    assert values.float().tolist() == [-4.0, -50.0, pytest.approx(0.1, rel=2**-8)]


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    index, _ = ChunkTopK(k=2, chunk=4).encode(x).parts
    assert unpack_index(index, 8, 4).tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000])
def test_every_chunk_has_its_share(numel: int) -> None:
    codec, x = ChunkTopK(k=4, chunk=16, values="fp32"), normal(numel)
    out = roundtrip(codec, x)
    assert int((out != 0).sum()) == codec.count(numel)
    for own, sent in zip(x.split(16), out.split(16), strict=True):
        kept = sent != 0
        assert int(kept.sum()) == max(1, round(own.numel() / 4))
        assert torch.equal(sent[kept], own[kept])
        if not kept.all():
            assert own[kept].abs().min() >= own[~kept].abs().max()


def test_error_is_at_most_what_an_even_spread_would_lose() -> None:
    codec = ChunkTopK(k=4, chunk=64, values="fp32")
    for x in (normal(6400), torch.ones(6400), normal(6400) ** 5):
        assert squared_error(x, roundtrip(codec, x)) <= 1 - 4 / 64 + 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected_first(bad: float) -> None:
    ranks = Ranks(ChunkTopK(k=1, chunk=10), "residual", "gather", (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()


def test_bits_of_sparseloco_on_the_wire() -> None:
    """Two bits a value and the place in its chunk would be 0.219 a parameter, 146 times less."""
    codec, numel = parse("chunktopk:k=64,chunk=4096 | codebook:bits=2"), 1 << 22
    bits = 8 * codec.encode(normal(numel)).nbytes / numel
    assert bits <= (2 + 12) / 64
    assert bits == pytest.approx((2 + 8) / 64, rel=1e-3)
    assert 32 / bits > 200


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(ChunkTopK(k=3, chunk=100), eighths(1050)) == "f7c28408"


def test_squares_of_a_matrix_by_hand() -> None:
    """Of 5 x 6 entries in squares of 2: bands of two rows, of three squares each, and one row."""
    matrix = torch.arange(30.0).view(5, 6)
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert in_squares(matrix, 2).tolist() == [*order, *(12 + i for i in order), *range(24, 30)]
    # The largest are 3, 7 (first and second square), 10, then one a square, then 25 and 28.
    x = torch.zeros(5, 6)
    for place in (7, 3, 10, 12, 15, 23, 27, 28):
        x.view(-1)[place] = 100.0 - place
    x.view(-1)[25] = 99.0
    index, _ = ChunkTopK(k=1, chunk=4, square=True).encode(x).parts
    assert unpack_index(index, 30, 8).tolist() == [3, 7, 10, 12, 15, 23, 25, 28]


def test_squares_cut_off_at_the_edge() -> None:
    """Of 3 x 5 entries in squares of 2: the third square of a band has one column."""
    order = [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert in_squares(torch.arange(15.0).view(3, 5), 2).tolist() == order


@pytest.mark.parametrize("shape", [(16, 24), (17, 5), (3, 50), (1, 9), (40, 1), (6, 5, 7)])
def test_squares_have_their_share(shape: tuple[int, ...]) -> None:
    codec, x = ChunkTopK(k=4, chunk=16, values="fp32", square=True), normal(*shape)
    out = roundtrip(codec, x)
    assert int((out != 0).sum()) == codec.count(x.numel())
    own, sent = (in_squares(t.view(shape[0], -1), 4) for t in (x, out))
    assert torch.equal(roundtrip(ChunkTopK(k=4, chunk=16, values="fp32"), own), sent)
    whole = normal(64, 64)
    assert squared_error(whole, roundtrip(codec, whole)) <= 1 - 4 / 16


def test_squares_of_a_vector_are_runs() -> None:
    x = normal(100)
    square, run = (ChunkTopK(k=2, chunk=16, square=flag).encode(x).parts for flag in (True, False))
    assert all(map(torch.equal, square, run))


@pytest.mark.parametrize(("k", "chunk"), [(0, 8), (9, 8), (1, 0), (1.5, 8), (1, 1 << 25)])
def test_settings_out_of_range(k: int, chunk: int) -> None:
    with pytest.raises(ConfigError, match="chunktopk: "):
        ChunkTopK(k=k, chunk=chunk)


def test_squares_need_a_square_number() -> None:
    with pytest.raises(ConfigError, match="chunktopk: chunk must be a square number, got 32"):
        ChunkTopK(k=1, chunk=32, square=True)
    with pytest.raises(ConfigError, match="chunktopk: square must be"):
        parse("chunktopk:square=7")
