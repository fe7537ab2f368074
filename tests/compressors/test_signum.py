"""Signum: votes on momentum, which remembers numbers only."""

from hashlib import sha256

import pytest
import torch
from few_ranks import CPU, Ranks, bits_per_entry, eighths, normal, roundtrip, with_entry
from torch import Tensor

from gradwire.compressors.signum import Signum
from gradwire.engine.legality import check_memory
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.memory.residual import Residual
from gradwire.types import AllGather, EFInput, EncodeContext
from gradwire.wire.layout import pack
from gradwire.wire.sign_votes import votes_layout


def momentum(ranks: Ranks, rank: int = 0) -> Tensor:
    return ranks.lanes[rank].aggregator_state["momentum"]


def ideal_bits(codec: Signum, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 1


def test_momentum_by_hand() -> None:
    """beta = 1/2: 4, then (4 - 2)/2 = 1, then (1 - 2)/2 = -1/2; the sign follows late."""
    ranks = Ranks("signum:beta=0.5", "none", "gather", (1,), size=1)
    steps = [(4.0, 1.0, 4.0), (-2.0, 1.0, 1.0), (-2.0, -1.0, -0.5)]
    for ef, sign, kept in steps:
        assert ranks.step(torch.tensor([ef])).tolist() == [sign]
        assert momentum(ranks).tolist() == [kept]


def test_without_momentum_it_is_the_sign_of_the_gradient() -> None:
    ranks = Ranks("signum:beta=0", "none", "gather", (50,), size=1)
    for seed in range(3):
        x = normal(50, seed=seed)
        assert torch.equal(ranks.step(x), x.sign())


def test_each_rank_votes_on_its_own_momentum() -> None:
    ranks = Ranks("signum:beta=0.9", "none", "gather", (2,), size=3)
    ranks.step(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 1.0]), torch.tensor([-1.0, 1.0]))
    out = ranks.step(*[torch.tensor([-1.0, -20.0])] * 3)
    assert out.tolist() == [1.0, -1.0]
    torch.testing.assert_close(momentum(ranks, 2), torch.tensor([-1.0, -1.1]))


def test_momentum_sees_through_noise() -> None:
    """A gradient of 0.1 under noise of 1: after many steps nearly all signs are right."""
    ranks = Ranks("signum:beta=0.99", "none", "gather", (1000,), size=1)
    for seed in range(300):
        out = ranks.step(0.1 + normal(1000, seed=seed))
    assert (out > 0).float().mean() > 0.85
    assert (normal(1000, seed=299) + 0.1 > 0).float().mean() < 0.6


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_result_does_not_grow_with_the_ranks(size: int) -> None:
    ranks = Ranks("signum", "none", "gather", (6,), size=size)
    assert ranks.step(*[torch.full((6,), -2.0)] * size).tolist() == [-1.0] * 6


def test_ties_and_zeros_do_not_move() -> None:
    ranks = Ranks("signum", "none", "gather", (2,))
    assert ranks.step(torch.tensor([1.0, -1.0]), torch.tensor([-3.0, -3.0])).tolist() == [0.0, -1.0]
    ranks = Ranks("signum", "none", "gather", (50,))
    for _ in range(3):
        assert torch.equal(ranks.step(*[torch.zeros(50)] * 2), torch.zeros(50))
    x = normal(50)
    assert torch.equal(ranks.step(x, torch.zeros(50)), x.sign())


def test_momentum_is_known_before_the_votes_travel() -> None:
    """The guard checks it together with the message; a step that is skipped discards it."""
    codec, ctx = Signum(), EncodeContext((4,))
    state = codec.state(ctx, CPU)
    rounds = codec.rounds(EFInput(torch.ones(4)), state, ctx)
    request = next(rounds)
    assert isinstance(request, AllGather)
    assert state["momentum"].tolist() == [1.0] * 4
    with pytest.raises(StopIteration):
        rounds.send([request.parts])
    assert state["momentum"].tolist() == [1.0] * 4


def test_the_residual_is_what_was_not_sent() -> None:
    codec, ctx = Signum(), EncodeContext((3,))
    residual_out = torch.empty(3)
    rounds = codec.rounds(
        EFInput(torch.tensor([3.0, -0.5, 1.0]), None, residual_out), codec.state(ctx, CPU), ctx
    )
    next(rounds)
    assert residual_out.tolist() == [2.0, 0.5, 0.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("first", [True, False])
def test_non_finite_entries_lose_the_vote_and_do_not_stay(bad: float, first: bool) -> None:
    ranks = Ranks("signum:beta=0.5", "none", "gather", (50,), size=2)
    if not first:
        ranks.step(torch.ones(50), torch.ones(50))
    before = momentum(ranks, 1).clone()
    good, x = normal(50), normal(50, seed=1)
    out = ranks.step(good, with_entry(x, 7, bad))
    assert torch.equal(out, momentum(ranks, 0).sign())
    assert torch.equal(momentum(ranks, 1), before)
    ranks.step(good, x)
    assert torch.equal(momentum(ranks, 1), x if first else 0.5 * before + 0.5 * x)


def test_large_gradients_of_changing_sign_do_not_overflow() -> None:
    ranks = Ranks("signum", "none", "gather", (5,), size=1)
    for sign in (1, -1, 1):
        ranks.step(torch.full((5,), sign * 3e38))
        assert momentum(ranks).isfinite().all()


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_small_sizes(numel: int) -> None:
    ranks = Ranks("signum", "none", "gather", (numel,))
    x = normal(numel)
    assert torch.equal(ranks.step(x, x), x.sign())
    assert torch.equal(roundtrip(Signum(), x), x.sign())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("signum", "none", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


def test_plan_and_memory() -> None:
    plan = make_plan("signum", None, "auto", [torch.zeros(100, 100)], 4)
    assert str(plan.exchange) == "gather"
    assert plan.describe()["memory"] == "none"
    with pytest.raises(ConfigError, match=r"^signum does not go with memory 'residual'"):
        check_memory(Signum(), Residual())


def test_one_bit_on_the_wire() -> None:
    assert bits_per_entry(Signum(), normal(1_000_000)) <= 1.01
    ranks = Ranks("signum", "none", "gather", (1000,))
    ranks.step(normal(1000), normal(1000))
    assert ranks.network.meters[0].message_bytes == Signum().nbytes((1000,)) == 132


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    x = eighths(1003)
    packed = pack([Signum().encode(x).parts], [votes_layout(1003)])
    assert sha256(packed.numpy().tobytes()).hexdigest()[:8] == "bdae5e0e"


@pytest.mark.parametrize("beta", [1.0, -0.1, 1.5, float("nan"), "0.9", True])
def test_beta_out_of_range(beta: float) -> None:
    with pytest.raises(ConfigError, match=rf"^signum: beta must be in \[0, 1\), got {beta!r}$"):
        Signum(beta=beta)
