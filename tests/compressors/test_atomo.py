"""ATOMO: singular vectors drawn at random, exact on average."""

from hashlib import sha256

import pytest
import torch
from few_ranks import Ranks, normal, roundtrip, squared_error, with_entry
from torch import Tensor

from gradwire.compressors.atomo import Atomo, chances
from gradwire.engine.legality import check_memory
from gradwire.errors import ConfigError
from gradwire.spec import parse_memory
from gradwire.types import EncodeContext


def draws(codec: Atomo, m: Tensor, count: int) -> Tensor:
    """Returns decoded independent messages of `m`, one per row."""
    shape = tuple(m.shape)
    return torch.stack(
        [roundtrip(codec, m, EncodeContext(shape, step=s)).view(-1) for s in range(count)]
    )


def test_by_hand() -> None:
    """Singular values 3 and 1: one atom, 4 on the first diagonal place for three of four draws."""
    decoded = draws(Atomo(rank=1), torch.diag(torch.tensor([3.0, 1.0])), 400)
    kinds = decoded.round(decimals=4).abs().unique(dim=0).tolist()
    assert kinds == [[0, 0, 0, 4], [4, 0, 0, 0]]
    assert (decoded[:, 0] > 2).float().mean() == pytest.approx(0.75, abs=4 * 0.433 / 20)


def test_probabilities() -> None:
    """In proportion; certain where that exceeds one, and then the others share the rest."""
    assert chances(torch.tensor([4.0, 3.0, 2.0, 1.0]), 2).tolist() == pytest.approx(
        [0.8, 0.6, 0.4, 0.2]
    )
    assert chances(torch.tensor([8.0, 1.0, 1.0]), 2).tolist() == [1.0, 0.5, 0.5]
    assert chances(torch.tensor([90.0, 8.0, 1.0, 1.0]), 3).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert chances(torch.tensor([2.0, 1.0, 0.0]), 2).tolist() == [1.0, 1.0, 0.0]
    assert chances(torch.tensor([2.0, 0.0, 0.0]), 2).tolist() == [1.0, 0.0, 0.0]
    assert chances(torch.zeros(3), 2).tolist() == [0.0, 0.0, 0.0]
    assert chances(torch.tensor([2.0, 1.0]), 2).tolist() == [1.0, 1.0]
    s = normal(50).abs().sort(descending=True).values ** 3
    for count in (1, 5, 20, 49, 50):
        p = chances(s, count)
        assert p.sum() == pytest.approx(count)
        assert ((p > 0) & (p <= 1)).all()


@pytest.mark.parametrize("rank", [1, 3])
def test_unbiased(rank: int) -> None:
    m = normal(12, 9)
    decoded = draws(Atomo(rank=rank), m, 1000).double()
    directions = torch.cat([m.view(1, -1), torch.ones(1, 108), normal(8, 108, seed=5)]).double()
    sums = decoded @ directions.T
    error = (sums.mean(0) - directions @ m.double().view(-1)).abs()
    assert (error <= 4 * sums.std(0) / 1000**0.5 + 1e-4).all()


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_variance_is_what_the_paper_states(rank: int) -> None:
    m = normal(20, 10)
    s = torch.linalg.svdvals(m.double())
    expected = (s.square() * (1 / chances(s, rank) - 1)).sum() / s.square().sum()
    decoded = draws(Atomo(rank=rank), m, 300)
    errors = torch.tensor([squared_error(m.view(-1), out) for out in decoded])
    assert errors.mean() == pytest.approx(float(expected), abs=4 * float(errors.std()) / 300**0.5)
    assert expected <= 10 / rank - 1


def test_exactly_so_many_atoms() -> None:
    for step in range(20):
        out = roundtrip(Atomo(rank=3), normal(12, 9), EncodeContext((12, 9), step=step))
        assert torch.linalg.matrix_rank(out) == 3


@pytest.mark.parametrize("shape", [(30, 20), (5, 40), (3, 2, 4)])
def test_exact_on_a_gradient_of_that_rank(shape: tuple[int, ...]) -> None:
    cols = torch.Size(shape[1:]).numel()
    m = (normal(shape[0], 3) @ normal(3, cols, seed=1)).view(shape)
    assert squared_error(m, roundtrip(Atomo(rank=3), m)) < 1e-9
    ranks = Ranks("atomo:rank=3", "none", "gather", shape)
    assert squared_error(m, ranks.step(m, m)) < 1e-9


def test_ranks_draw_independently_and_the_mean_is_over_all() -> None:
    m = normal(20, 10)
    one = Ranks("atomo:rank=2", "none", "gather", (20, 10), size=1).step(m)
    many = Ranks("atomo:rank=2", "none", "gather", (20, 10), size=64).step(*[m] * 64)
    assert squared_error(m, many) < 0.1 * squared_error(m, one)


def test_no_contraction_and_the_reason_is_given() -> None:
    with pytest.raises(ConfigError, match="n/3 - 1 of the squared norm"):
        check_memory(Atomo(), parse_memory("residual"))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 3), (3, 0), (1, 9), (9, 1)])
def test_shapes_without_two_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, -1.5)
    torch.testing.assert_close(Ranks("atomo", "none", "gather", shape).step(x, x), x)


def test_zeros_decode_to_zeros() -> None:
    assert torch.equal(roundtrip(Atomo(), torch.zeros(9, 7)), torch.zeros(9, 7))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    m = normal(9, 7) * size
    assert squared_error(m, roundtrip(Atomo(rank=7), m)) < 1e-9


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_everywhere(bad: float) -> None:
    ranks = Ranks("atomo", "none", "gather", (9, 7), size=3)
    out = ranks.step(normal(9, 7), with_entry(normal(9, 7), 7, bad), normal(9, 7))
    assert out.isnan().all()
    assert ranks.step(*[normal(9, 7)] * 3).isfinite().all()


def test_bits_on_the_wire() -> None:
    payload = Atomo(rank=3).encode(normal(200, 5000))
    assert 8 * payload.nbytes / 1e6 == 32 * 3 * 5200 / 1e6
    ranks = Ranks("atomo:rank=3", "none", "gather", (30, 20))
    ranks.step(normal(30, 20), normal(30, 20))
    assert ranks.network.meters[0].message_bytes == 4 * 3 * 50


def test_bytes_on_the_wire_are_frozen() -> None:
    """Of diagonal matrices the vectors are unit vectors, up to a sign that goes with LAPACK."""
    m = torch.diag(torch.tensor([4.0, 2.0, 1.5, 0.5]))
    parts = Atomo(rank=2).encode(m).parts
    wire_bytes = b"".join((part.abs() + 0.0).numpy().tobytes() for part in parts)
    assert sha256(wire_bytes).hexdigest()[:8] == "044f879a"


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"^atomo: rank must be .*at least 1, got {rank}$"):
        Atomo(rank=rank)
