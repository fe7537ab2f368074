"""ACP-SGD: one factor a step, exact on low rank from the second step on, never NaN of numbers."""

from hashlib import sha256

import pytest
import torch
from few_ranks import CPU, Ranks, normal, roundtrip, squared_error, with_entry
from torch import Tensor

from gradwire.compressors.acpsgd import REDRAW_EVERY, AcpSGD
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext, Mean


def low_rank(rows: int, cols: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, cols, seed=seed + 100)


def test_two_steps_by_hand() -> None:
    """Two rows (3, 4) and two of zeros: with Q = (.6, .8), P is (5, 5, 0, 0)."""
    flat = torch.tensor([3.0, 4.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    state = {"p": torch.zeros(4, 1), "q": torch.tensor([[0.6], [0.8]])}
    rounds = AcpSGD().rounds(EFInput(flat.clone()), state, EncodeContext((4, 2)))
    request = next(rounds)
    assert isinstance(request, Mean)
    torch.testing.assert_close(request.parts[0], torch.tensor([[5.0], [5.0], [0.0], [0.0]]))
    with pytest.raises(StopIteration) as end:
        rounds.send([request.parts])
    torch.testing.assert_close(end.value.value, flat)
    torch.testing.assert_close(state["p"], torch.tensor([[5.0], [5.0], [0.0], [0.0]]))
    rounds = AcpSGD().rounds(EFInput(flat.clone()), state, EncodeContext((4, 2), step=1))
    half = 0.5**0.5
    torch.testing.assert_close(next(rounds).parts[0], torch.tensor([[6 * half], [8 * half]]))


@pytest.mark.parametrize(
    ("rank", "shape"), [(1, (30, 20)), (4, (30, 20)), (4, (5, 300)), (3, (3, 9)), (2, (2, 3, 4, 5))]
)
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_exact_on_a_gradient_of_that_rank(rank: int, shape: tuple[int, ...], memory: str) -> None:
    m = low_rank(shape[0], torch.Size(shape[1:]).numel(), rank).view(shape)
    ranks = Ranks(AcpSGD(rank=rank), memory, "mean", shape)
    decoded = torch.stack([ranks.step(m, m) for _ in range(6)])
    if memory == "none":
        assert all(squared_error(m, out) < 1e-8 for out in decoded[1:])
    # The residual of an even step has the columns of P, so the odd one after it sends all of it.
    else:
        assert all(squared_error(2 * m, decoded[i : i + 2].sum(0)) < 1e-8 for i in (0, 2, 4))


def test_one_mean_a_step_of_one_factor() -> None:
    ranks = Ranks("acpsgd:rank=4", "residual", "mean", (30, 20))
    for _ in range(2):
        out = ranks.step(normal(30, 20), normal(30, 20, seed=1))
        assert torch.linalg.matrix_rank(out) == 4
    assert ranks.network.meters[0].calls == 2
    assert ranks.network.meters[0].message_bytes == 4 * 4 * (30 + 20)
    assert AcpSGD(rank=4).nbytes((30, 20)) == AcpSGD(rank=4).nbytes((20, 30)) == 4 * 4 * 30


def test_the_first_step_loses_what_a_random_subspace_does() -> None:
    """1 - rank/n for the shorter side n, whichever it is."""
    for shape in ((80, 20), (20, 80)):
        m = normal(*shape)
        errors = [
            squared_error(m, roundtrip(AcpSGD(rank=4), m, EncodeContext(shape, seed=seed)))
            for seed in range(50)
        ]
        assert sum(errors) / 50 == pytest.approx(1 - 4 / 20, abs=0.02)


def test_a_projection_never_adds_error() -> None:
    for step in range(20):
        m = normal(20, 30, seed=step)
        error = squared_error(m, roundtrip(AcpSGD(rank=2), m, EncodeContext((20, 30), step=step)))
        assert 0 < error < 1


def test_a_gradient_at_right_angles_to_the_subspace_is_sent_eventually() -> None:
    """Rank 1 on the first axis: what lies on the others waits for a column that is drawn anew."""
    m = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    ranks = Ranks("acpsgd", "residual", "mean", (4, 4), size=1)
    for factor in ranks.lanes[0].aggregator_state.values():
        factor.copy_(torch.eye(4)[:, :1])
    for _ in range(REDRAW_EVERY):
        assert ranks.step(m).count_nonzero() == 1
    for _ in range(2 * REDRAW_EVERY):
        ranks.step(m)
    assert squared_error(300 * m, 300 * m - ranks.residual()) < 1e-3


@pytest.mark.parametrize("rank", [1, 3])
def test_a_column_that_is_redrawn_keeps_its_share_whatever_came_before(rank: int) -> None:
    m = normal(30, 8)
    m[:, :rank] = 0
    axes = {"p": torch.eye(30)[:, :rank], "q": torch.eye(8)[:, :rank]}
    errors = torch.empty(400)
    for seed in range(400):
        ef = EFInput(m.reshape(-1).clone(), torch.zeros(240), torch.empty(240))
        next(
            AcpSGD(rank=rank).rounds(
                ef, dict(axes), EncodeContext((30, 8), seed=seed, step=REDRAW_EVERY)
            )
        )
        errors[seed] = squared_error(m, m - ef.residual_out.view(30, 8))
    assert errors.max() <= 1 + 1e-6
    assert errors.mean() <= 1 - 1 / 8 + 4 * errors.std() / 20


def test_the_result_is_the_mean_over_ranks_not_the_sum() -> None:
    ranks = Ranks("acpsgd", "none", "mean", (6, 5))
    ranks.step(torch.ones(6, 5), torch.ones(6, 5))
    torch.testing.assert_close(
        ranks.step(torch.ones(6, 5), 3 * torch.ones(6, 5)), torch.full((6, 5), 2.0)
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_warm_start_comes_close_to_the_best_of_that_rank(rank: int) -> None:
    m = low_rank(60, 40, 5) + 0.3 * normal(60, 40, seed=9)
    ranks = Ranks(AcpSGD(rank=rank), "none", "mean", (60, 40), size=1)
    errors = [squared_error(m, ranks.step(m)) for _ in range(50)]
    values = torch.linalg.svdvals(m.double()).square()
    assert errors[-1] == pytest.approx(float(values[rank:].sum() / values.sum()), rel=1e-2)


def test_the_residual_is_what_this_rank_did_not_send() -> None:
    """M - M Q Qᵀ for its own M and the common Q."""
    ranks = Ranks("acpsgd:rank=2", "residual", "mean", (6, 5))
    q = torch.linalg.qr(ranks.lanes[0].aggregator_state["q"]).Q
    own = [normal(6, 5), normal(6, 5, seed=1)]
    ranks.step(*own)
    for rank, m in enumerate(own):
        torch.testing.assert_close(ranks.residual(rank), m - m @ q @ q.T, rtol=1e-4, atol=1e-5)


def test_factors_are_the_same_on_every_rank_and_others_for_every_parameter() -> None:
    ranks = Ranks("acpsgd:rank=2", "residual", "mean", (9, 7), size=3)
    for step in range(3):
        ranks.step(*[normal(9, 7, seed=3 * step + rank) for rank in range(3)])
        for key in ("p", "q"):
            assert all(
                torch.equal(a.aggregator_state[key], ranks.lanes[0].aggregator_state[key])
                for a in ranks.lanes
            )
    ctx = EncodeContext((9, 7))
    start = AcpSGD().state(ctx, CPU)
    assert not torch.equal(start["q"], AcpSGD().state(ctx._replace(lane_id=4), CPU)["q"])


def test_zeros_decode_to_zeros_and_keep_the_factor() -> None:
    ranks = Ranks("acpsgd:rank=2", "none", "mean", (9, 7))
    start = {key: value.clone() for key, value in ranks.lanes[0].aggregator_state.items()}
    for _ in range(2):
        assert torch.equal(ranks.step(*[torch.zeros(9, 7)] * 2), torch.zeros(9, 7))
    assert all(torch.equal(ranks.lanes[0].aggregator_state[key], start[key]) for key in ("p", "q"))
    m = low_rank(9, 7, 2)
    ranks.step(m, m)
    assert squared_error(m, ranks.step(m, m)) < 1e-9


def test_less_than_the_rank_is_finite_and_more_comes_back() -> None:
    ranks = Ranks("acpsgd:rank=4", "none", "mean", (9, 7))
    for step in range(6):
        assert ranks.step(*[low_rank(9, 7, 1 + step % 2, seed=step)] * 2).isfinite().all()
        assert all(factor.isfinite().all() for factor in ranks.lanes[0].aggregator_state.values())
    m = low_rank(9, 7, 4, seed=50)
    ranks.step(m, m)
    assert squared_error(m, ranks.step(m, m)) < 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("when", [0, 1])
def test_non_finite_entries_appear_and_do_not_stay(bad: float, when: int) -> None:
    ranks = Ranks("acpsgd:rank=2", "none", "mean", (9, 7), size=3)
    for step in range(2):
        value = bad if step == when else 1.0
        out = ranks.step(normal(9, 7), with_entry(normal(9, 7), 7, value), normal(9, 7))
        assert bool(out.isfinite().all()) == (step != when)
    m = low_rank(9, 7, 2)
    ranks.step(m, m, m)
    assert squared_error(m, ranks.step(m, m, m)) < 1e-6


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e25])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    m = low_rank(9, 7, 2) * size
    ranks = Ranks("acpsgd:rank=2", "none", "mean", (9, 7), size=1)
    ranks.step(m)
    assert squared_error(m, ranks.step(m)) < 1e-6


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 3), (3, 0), (1, 9), (9, 1), (2, 3, 4)])
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_shapes_without_two_dimensions(shape: tuple[int, ...], memory: str) -> None:
    ranks = Ranks("acpsgd", memory, "mean", shape)
    x = torch.full(shape, -1.5)
    outs = [ranks.step(x, x) for _ in range(4)]
    decoded = outs[-1] if memory == "none" else (outs[-1] + outs[-2]) / 2
    torch.testing.assert_close(decoded, x, rtol=1e-4, atol=1e-4)


def test_bits_on_the_wire() -> None:
    payload = AcpSGD(rank=4).encode(normal(1000, 1000))
    assert 8 * payload.nbytes / 1e6 == 32 * 4 * 1000 / 1e6


def test_bytes_on_the_wire_are_frozen() -> None:
    """One even and one odd step about integers, from factors whose norm is a power of two."""
    m = torch.arange(64.0)
    state = {"p": torch.ones(16, 1), "q": torch.ones(4, 1)}
    sent = [
        next(AcpSGD().rounds(EFInput(m), dict(state), EncodeContext((16, 4), step=s)))
        for s in (0, 1)
    ]
    wire_bytes = b"".join(r.parts[0].contiguous().numpy().tobytes() for r in sent)
    assert sha256(wire_bytes).hexdigest()[:8] == "6e5fb81d"


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"^acpsgd: rank must be .*at least 1, got {rank}$"):
        AcpSGD(rank=rank)
