"""SignSGD: one rank, one vote, and nobody drifts who has no gradient."""

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.signsgd import SignSGD
from gradwire.engine.legality import check_memory
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.memory.residual import Residual
from gradwire.spec import parse
from gradwire.types import EncodeContext

MAJORITY = "gather:aggregate=majority"


def ideal_bits(codec: SignSGD, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 1


def test_signs_without_a_scale(backend: str) -> None:
    x = torch.tensor([1.0, -2.0, 1e-30, -5e30])
    bits, weight = SignSGD().encode(x).parts
    assert bits.tolist() == [0b1010]
    assert weight.tolist() == [1.0]
    assert roundtrip(SignSGD(), x).tolist() == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 33, 1000])
def test_signs_are_exact(backend: str, numel: int) -> None:
    x = normal(numel)
    assert torch.equal(roundtrip(SignSGD(), x), x.sign())


def test_the_majority_decides_however_loud_the_minority() -> None:
    ranks = Ranks("signsgd", "none", MAJORITY, (3,), size=3)
    loud = torch.tensor([-1e9, 1e9, -1e9])
    out = ranks.step(torch.tensor([0.1, -0.1, 0.1]), torch.tensor([0.2, -3.0, -2.0]), loud)
    assert out.tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_result_does_not_grow_with_the_ranks(size: int) -> None:
    ranks = Ranks("signsgd", "none", MAJORITY, (6,), size=size)
    assert ranks.step(*[torch.full((6,), -2.0)] * size).tolist() == [-1.0] * 6


def test_a_tie_is_zero() -> None:
    ranks = Ranks("signsgd", "none", MAJORITY, (2,))
    assert ranks.step(torch.tensor([1.0, -1.0]), torch.tensor([-3.0, -3.0])).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_a_tensor_of_zeros_does_not_move(backend: str, numel: int) -> None:
    for zeros in (torch.zeros(numel), -torch.zeros(numel)):
        assert torch.equal(roundtrip(SignSGD(), zeros), torch.zeros(numel))
        ranks = Ranks("signsgd", "none", MAJORITY, (numel,))
        assert torch.equal(ranks.step(zeros, zeros), torch.zeros(numel))


def test_a_rank_of_zeros_does_not_vote() -> None:
    ranks = Ranks("signsgd", "none", MAJORITY, (50,), size=3)
    x = normal(50)
    assert torch.equal(ranks.step(torch.zeros(50), x, torch.zeros(50)), x.sign())


def test_single_zeros_do_not_drift(backend: str) -> None:
    """A thousand of them over a hundred steps: their signs are coins, another for each rank."""
    x = with_entry(torch.zeros(1001), 1000, -3.0)
    coins = torch.stack(
        [
            roundtrip(SignSGD(), x, EncodeContext((1001,), r, 2, step=s))
            for s in range(50)
            for r in range(2)
        ]
    )
    assert torch.equal(coins[:, 1000], -torch.ones(100))
    tosses = coins[:, :1000]
    assert tosses.abs().eq(1).all()
    assert abs(tosses.mean()) <= 4 / 100_000**0.5
    # By entry, by step, and between the two ranks.
    assert tosses.mean(0).abs().max() <= 5 / 10
    assert tosses.mean(1).abs().max() <= 5 / 1000**0.5
    assert abs((tosses[0::2] * tosses[1::2]).mean()) <= 4 / 50_000**0.5
    assert abs((tosses[:, 1:] * tosses[:, :-1]).mean()) <= 4 / 100_000**0.5


def test_the_key_moves_no_sign_but_those_of_zeros() -> None:
    x = normal(100)
    contexts = [EncodeContext((100,), rank=rank, world_size=3, step=rank) for rank in range(3)]
    assert all(torch.equal(roundtrip(SignSGD(), x, ctx), x.sign()) for ctx in contexts)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_in_the_message_and_lose_the_vote(
    backend: str, bad: float
) -> None:
    spoilt = with_entry(normal(50), 7, bad)
    assert roundtrip(SignSGD(), spoilt).isnan().all()
    good = normal(50, seed=1)
    out = Ranks("signsgd", "none", "gather", (50,), size=2).step(good, spoilt)
    assert out.isnan().all()
    out = Ranks("signsgd", "none", MAJORITY, (50,), size=2).step(good, spoilt)
    assert torch.equal(out, good.sign())


@pytest.mark.parametrize("size", [1e-45, 1e-25, 1e25, 1e38])
def test_the_size_of_a_gradient_does_not_matter(backend: str, size: float) -> None:
    x = torch.tensor([1.0, -1.0, 1.0]) * size
    assert roundtrip(SignSGD(), x).tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("signsgd", "none", MAJORITY, (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


def test_votes_are_counted_unless_asked_otherwise() -> None:
    plan = make_plan("signsgd", None, "auto", [torch.zeros(100, 100)], 4)
    assert str(plan.exchange) == MAJORITY
    assert plan.describe()["memory"] == "none"


def test_a_residual_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^signsgd does not go with memory 'residual'.*scale"):
        check_memory(SignSGD(), Residual())


def test_one_bit_on_the_wire() -> None:
    assert bits_per_entry(SignSGD(), normal(1_000_000)) <= 1.01


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Eighths hold zeros, so the coins are in it."""
    assert wire_hash(SignSGD(), eighths(1003)) == "bdae5e0e"


def test_it_has_no_parameters() -> None:
    with pytest.raises(ConfigError, match=r"^signsgd: unknown parameter \['lr'\], expected \[\]$"):
        parse("signsgd:lr=0.1")
