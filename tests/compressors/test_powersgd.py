"""PowerSGD: exact on low rank, better from step to step, and never NaN out of numbers."""

from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from few_ranks import CPU, Ranks, normal, roundtrip, squared_error, with_entry
from torch import Tensor

from gradwire.comm.simulated import Simulated
from gradwire.compressors._low_rank import matrix_shape
from gradwire.compressors.powersgd import PowerSGD
from gradwire.engine.make_plan import open_lane
from gradwire.engine.step import lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.kernels.reference import orthonormal
from gradwire.memory.residual import Residual
from gradwire.types import EFInput, EncodeContext, Mean


def low_rank(rows: int, cols: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, cols, seed=seed + 100)


def best_error(m: Tensor, rank: int) -> float:
    """The squared error of the best picture of this rank, relative to the squared norm."""
    values = torch.linalg.svdvals(m.double()).square()
    return float(values[rank:].sum() / values.sum())


def test_one_round_by_hand() -> None:
    """Equal row sums and Q of ones: P is (½, ½, ½, ½) and Q half the column sums."""
    m = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0], [3.0, 0.0]])
    rounds = PowerSGD().rounds(
        EFInput(m.view(-1).clone()), {"q": torch.ones(2, 1)}, EncodeContext((4, 2))
    )
    request = next(rounds)
    assert isinstance(request, Mean)
    assert request.parts[0].tolist() == [[3.0], [3.0], [3.0], [3.0]]
    request = rounds.send([request.parts])
    assert request.parts[0].tolist() == [[3.0], [3.0]]
    with pytest.raises(StopIteration) as end:
        rounds.send([request.parts])
    assert end.value.value.tolist() == [1.5] * 8


@pytest.mark.parametrize(
    ("rank", "shape"), [(1, (30, 20)), (4, (30, 20)), (4, (5, 300)), (3, (3, 9))]
)
def test_exact_on_a_gradient_of_that_rank(rank: int, shape: tuple[int, int]) -> None:
    m = low_rank(*shape, rank)
    assert squared_error(m, roundtrip(PowerSGD(rank=rank), m)) < 1e-9
    ranks = Ranks(PowerSGD(rank=rank), "none", "mean", shape)
    assert squared_error(m, ranks.step(m, m)) < 1e-9


def test_exact_where_only_the_mean_has_that_rank() -> None:
    common, noise = low_rank(30, 20, 1), normal(30, 20, seed=7)
    ranks = Ranks("powersgd", "none", "mean", (30, 20))
    assert squared_error(common, ranks.step(common + noise, common - noise)) < 1e-8


def test_several_matrices_of_one_shape_are_each_exact() -> None:
    matrices = [low_rank(12, 10, 1, seed=seed) for seed in range(3)]
    contexts = [EncodeContext((12, 10), lane_id=lane) for lane in range(3)]
    lanes = [open_lane(str(t.lane_id), PowerSGD(), Residual(), "mean", t, CPU) for t in contexts]
    outs = [m.clone() for m in matrices]
    network = Simulated(1)
    network.run([run_rounds([lane_rounds(g, lane) for g, lane in zip(outs, lanes, strict=True)])])
    assert network.meters[0].calls == 2
    for m, out in zip(matrices, outs, strict=True):
        assert squared_error(m, out) < 1e-9


def test_the_result_is_the_mean_over_ranks_not_the_sum() -> None:
    ranks = Ranks("powersgd", "none", "mean", (6, 5))
    torch.testing.assert_close(ranks.step(torch.ones(6, 5), torch.ones(6, 5)), torch.ones(6, 5))
    torch.testing.assert_close(
        ranks.step(torch.ones(6, 5), 3 * torch.ones(6, 5)), torch.full((6, 5), 2.0)
    )


def test_the_rank_asked_for_is_the_rank_sent() -> None:
    ranks = Ranks("powersgd:rank=4", "residual", "mean", (30, 20))
    out = ranks.step(normal(30, 20), normal(30, 20, seed=1))
    assert torch.linalg.matrix_rank(out) == 4
    assert ranks.network.meters[0].message_bytes == 4 * 4 * (30 + 20)
    assert PowerSGD(rank=4).nbytes((30, 20)) == 4 * 4 * (30 + 20)


def test_the_start_is_the_same_on_every_rank_and_another_for_every_parameter() -> None:
    ctx = EncodeContext((30, 20), world_size=4, lane_id=3)
    starts = [PowerSGD(rank=2).state(ctx._replace(rank=r), CPU)["q"] for r in range(4)]
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert not torch.equal(starts[0], PowerSGD(rank=2).state(ctx._replace(lane_id=4), CPU)["q"])
    assert not torch.equal(starts[0], PowerSGD(rank=2).state(ctx._replace(seed=1), CPU)["q"])


@pytest.mark.parametrize("rank", [1, 3])
def test_warm_start_comes_close_to_the_best_of_that_rank(rank: int) -> None:
    m = low_rank(60, 40, 5) + 0.3 * normal(60, 40, seed=9)
    ranks = Ranks(PowerSGD(rank=rank), "none", "mean", (60, 40), size=1)
    errors = [squared_error(m, ranks.step(m)) for _ in range(25)]
    assert all(after <= before + 1e-6 for before, after in pairwise(errors))
    assert errors[-1] < errors[0]
    assert errors[-1] == pytest.approx(best_error(m, rank), rel=1e-2)


def test_all_ranks_keep_the_same_start() -> None:
    ranks = Ranks("powersgd:rank=2", "residual", "mean", (9, 7), size=3)
    for step in range(3):
        ranks.step(*[normal(9, 7, seed=3 * step + rank) for rank in range(3)])
        starts = [lane.aggregator_state["q"] for lane in ranks.lanes]
        assert all(torch.equal(start, starts[0]) for start in starts)


@pytest.mark.parametrize("others", [0, 1])
def test_the_residual_is_what_this_rank_did_not_send(others: int) -> None:
    """M - P Pᵀ M for its own M, however many lanes share the message."""
    shape, size = (6, 5), 2
    ef = [[normal(*shape, seed=10 * r + i) for i in range(1 + others)] for r in range(size)]
    lanes = [
        [
            open_lane(
                str(i),
                PowerSGD(),
                Residual(),
                "mean",
                EncodeContext(shape, r, size, lane_id=i),
                CPU,
            )
            for i in range(1 + others)
        ]
        for r in range(size)
    ]
    outs = [[g.clone() for g in row] for row in ef]
    programs = [
        run_rounds([lane_rounds(g, lane) for g, lane in zip(gs, ls, strict=True)])
        for gs, ls in zip(outs, lanes, strict=True)
    ]
    Simulated(size).run(programs)
    for row in lanes:
        row[0].commit()
    p = torch.linalg.svd(outs[0][0]).U[:, :1]
    for row, own in zip(lanes, ef, strict=True):
        residual_out = row[0].memory_state["residual"].view(shape)
        torch.testing.assert_close(residual_out, own[0] - p @ (p.T @ own[0]), rtol=1e-4, atol=1e-5)


def test_zeros_decode_to_zeros_and_keep_the_factor() -> None:
    ranks = Ranks("powersgd:rank=2", "none", "mean", (9, 7))
    start = ranks.lanes[0].aggregator_state["q"].clone()
    assert torch.equal(ranks.step(*[torch.zeros(9, 7)] * 2), torch.zeros(9, 7))
    assert torch.equal(ranks.lanes[0].aggregator_state["q"], start)
    m = low_rank(9, 7, 2)
    assert squared_error(m, ranks.step(m, m)) < 1e-9


@pytest.mark.parametrize("memory", ["none", "residual"])
def test_less_than_the_rank_is_finite_and_exact(memory: str) -> None:
    ranks = Ranks("powersgd:rank=4", memory, "mean", (9, 7))
    for step in range(5):
        m = low_rank(9, 7, 1 + step % 2, seed=step)
        out = ranks.step(m, m)
        assert out.isfinite().all()
        assert squared_error(m, out) < 1e-6
        assert ranks.lanes[0].aggregator_state["q"].isfinite().all()
    m = low_rank(9, 7, 4, seed=50)
    assert squared_error(m, ranks.step(m, m)) < 1e-6


def test_one_row_that_is_not_zero() -> None:
    m = torch.zeros(9, 7)
    m[4] = normal(7)
    ranks = Ranks("powersgd:rank=2", "residual", "mean", (9, 7))
    torch.testing.assert_close(ranks.step(m, m), m)


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e25])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    m = low_rank(9, 7, 2) * size
    assert squared_error(m, roundtrip(PowerSGD(rank=2), m)) < 1e-6


@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e-20, 1e-10, 1.0, 1e10, 1e19, 1e25, 1e30])
def test_every_step_is_exact_at_every_scale(backend: str, memory: str, scale: float) -> None:
    """The warm start has no scale: the first step must not spoil those after it."""
    for rank in (1, 3):
        ranks = Ranks(PowerSGD(rank=rank), memory, "mean", (30, 20))
        for step in range(6):
            m = low_rank(30, 20, rank) * (scale * (1 + step))
            assert squared_error(m, ranks.step(m, m)) < 1e-9


def test_the_warm_start_is_orthonormal() -> None:
    ranks = Ranks("powersgd:rank=4", "residual", "mean", (30, 20))
    for step in range(3):
        ranks.step(*[normal(30, 20, seed=2 * step + rank) * 10.0 ** (8 * step) for rank in (0, 1)])
        q = ranks.lanes[0].aggregator_state["q"]
        torch.testing.assert_close(q.T @ q, torch.eye(4), rtol=0, atol=1e-5)


def test_columns_that_send_nothing_stay_usable() -> None:
    """A gradient of rank 1 leaves three columns without direction; they keep the one they had."""
    ranks = Ranks("powersgd:rank=4", "none", "mean", (30, 20))
    for seed in range(5):
        ranks.step(*[low_rank(30, 20, 1, seed=seed)] * 2)
        norms = ranks.lanes[0].aggregator_state["q"].norm(dim=0)
        assert (norms > 0.5).all()


def test_a_change_of_the_loss_scale_changes_nothing_but_the_scale() -> None:
    """Residuals are multiplied with the loss scale; Q has none."""
    plain, scaled = (Ranks("powersgd:rank=2", "residual", "mean", (30, 20)) for _ in range(2))
    before = 1.0
    for step, scale in enumerate([2.0**16, 2.0**17, 2.0**90, 2.0**-30, 2.0**15]):
        for lane in scaled.lanes:
            lane.scale_loss(scale / before)
        grads = [normal(30, 20, seed=2 * step + rank) for rank in (0, 1)]
        expected = plain.step(*grads) * scale
        assert torch.equal(scaled.step(*(grad * scale for grad in grads)), expected)
        before = scale


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 3), (3, 0), (1, 9), (9, 1), (2, 3, 4)])
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_shapes_without_two_dimensions(shape: tuple[int, ...], memory: str) -> None:
    ranks = Ranks("powersgd", memory, "mean", shape)
    x = torch.full(shape, -1.5)
    for _ in range(2):
        torch.testing.assert_close(ranks.step(x, x), x)


def test_kernels_of_convolutions_are_matrices_by_output_channel() -> None:
    assert matrix_shape((64, 3, 7, 7)) == (64, 147)
    assert matrix_shape((64, 256, 1, 1)) == (64, 256)
    assert matrix_shape((5,)) == (5, 1)
    assert matrix_shape(()) == (1, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_and_do_not_stay(bad: float) -> None:
    """The next gradient is encoded as if nothing had happened."""
    ranks = Ranks("powersgd:rank=2", "none", "mean", (9, 7), size=3)
    out = ranks.step(normal(9, 7), with_entry(normal(9, 7), 7, bad), normal(9, 7))
    assert not out.isfinite().all()
    m = low_rank(9, 7, 2)
    assert squared_error(m, ranks.step(m, m, m)) < 1e-6


@pytest.mark.parametrize("shape", [(50, 1), (50, 4), (5, 5), (1, 1), (1000, 16)])
def test_columns_become_orthonormal(shape: tuple[int, int]) -> None:
    p = orthonormal(normal(*shape))
    torch.testing.assert_close(p.T @ p, torch.eye(shape[1]), rtol=0, atol=1e-5)


def test_columns_of_very_different_size_become_orthonormal() -> None:
    p = orthonormal(normal(50, 4) * torch.tensor([1e6, 1.0, 1e-6, 1e3]))
    torch.testing.assert_close(p.T @ p, torch.eye(4), rtol=0, atol=1e-5)


def test_nearly_parallel_columns_become_orthonormal() -> None:
    a, b = normal(50), normal(50, seed=1)
    p = orthonormal(torch.stack([a, a + 1e-3 * b, b], dim=1))
    torch.testing.assert_close(p.T @ p, torch.eye(3), rtol=0, atol=1e-5)


def test_columns_keep_their_span() -> None:
    m = normal(50, 4)
    p = orthonormal(m)
    torch.testing.assert_close(p @ (p.T @ m), m, rtol=1e-4, atol=1e-4)


def test_columns_that_send_nothing_new_become_zero() -> None:
    a, b = normal(50), normal(50, seed=1)
    p = orthonormal(torch.stack([a, 2 * a, torch.zeros(50), b, a - b], dim=1))
    norms = p.norm(dim=0)
    torch.testing.assert_close(norms, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]))


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Both rounds about small integers with equal row sums, from a Q of ones."""
    m = torch.arange(32.0).view(4, 8)
    m[:, 7] += 28 * 10 - m.sum(1)
    rounds = PowerSGD().rounds(EFInput(m.view(-1)), {"q": torch.ones(8, 1)}, EncodeContext((4, 8)))
    first = next(rounds)
    second = rounds.send([first.parts])
    wire_bytes = b"".join(r.parts[0].contiguous().numpy().tobytes() for r in (first, second))
    assert sha256(wire_bytes).hexdigest()[:8] == "df3a6277"


@pytest.mark.parametrize("rank", [0, -1])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"^powersgd: rank must be at least 1, got {rank}$"):
        PowerSGD(rank=rank)


def test_rank_that_is_no_whole_number() -> None:
    with pytest.raises(ConfigError, match="powersgd: rank"):
        PowerSGD(rank=1.5)  # type: ignore[arg-type]
