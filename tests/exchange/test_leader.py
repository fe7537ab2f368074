"""Leader: the indices of one rank, the values of all; bytes do not grow with the world size."""

import re

import pytest
import torch

import gradwire
from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import open_lane
from gradwire.engine.step import lane_rounds, run_rounds
from gradwire.errors import ConfigError, WireError
from gradwire.exchange.leader import LeaderExchange
from gradwire.spec import parse, parse_memory
from gradwire.types import Broadcast, EFInput, EncodeContext, Mean
from gradwire.wire.indices import index_field
from gradwire.wire.layout import align
from lockstep import Lockstep, distance_after, noise

HALF = "topk:ratio=0.5,values=fp32"


def test_two_steps_by_hand() -> None:
    """Rank 0 leads with its first entry; then rank 1 leads, which adds -8 to a residual of -8."""
    workers = Lockstep(HALF, "residual", "leader", 2, size=2)
    grads = torch.tensor([4.0, 1.0]), torch.tensor([2.0, -8.0])
    assert workers.step(*grads).tolist() == [3.0, 0.0]
    assert workers.stacked_state("residual").tolist() == [[0.0, 1.0], [0.0, -8.0]]
    assert workers.step(*grads).tolist() == [0.0, (2 - 16) / 2]
    assert workers.stacked_state("residual").tolist() == [[4.0, 0.0], [2.0, 0.0]]


def test_ranks_lead_in_turn() -> None:
    """Each rank has its largest entry at its own index, which it selects when it leads."""
    workers = Lockstep("topk:ratio=0.2,values=fp32", "none", "leader", 5, size=5)
    grads = torch.eye(5) + 0.1
    chosen = [int(workers.step(*grads).argmax()) for _ in range(7)]
    assert chosen == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_sent_plus_residual_equals_the_input(size: int, numel: int) -> None:
    workers = Lockstep("topk:ratio=0.1,values=bf16", "residual", "leader", numel, size=size)
    sent, total = torch.zeros(numel), torch.zeros(numel)
    for step in range(12):
        grads = noise(size, numel, seed=step)
        out = workers.step(*grads)
        assert out.count_nonzero() <= max(1, round(0.1 * numel))
        sent, total = sent + out, total + grads.mean(dim=0)
    residual = workers.stacked_state("residual").mean(dim=0)
    torch.testing.assert_close(sent + residual, total, rtol=1e-5, atol=1e-5)


def test_values_are_sent_exactly_whatever_the_dtype_of_the_method() -> None:
    """The numbers are not exact in bf16, and all of them are sent."""
    grads = noise(3, 100)
    out = Lockstep("topk:ratio=1,values=bf16", "none", "leader", 100, size=3).step(*grads)
    torch.testing.assert_close(out, grads.mean(dim=0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_bytes_stay_flat_with_ranks(size: int) -> None:
    """Sends the leader's indices once, and a ring of 4 bytes per value: 2 (N-1)/N of them."""
    numel, count = 10_000, 100
    workers = Lockstep("topk:ratio=0.01", "none", "leader", numel, size=size)
    workers.step(*noise(size, numel))
    index_bytes = align(index_field(numel, count).numel or 0)
    ring = 2 * (size - 1) * 4 * count // size
    for rank, meter in enumerate(workers.network.meters):
        assert meter.calls == 2
        assert meter.sent_bytes == ring + index_bytes * (rank == 0)
        assert meter.received_bytes == ring + index_bytes * (rank != 0)
    # Packed indices of 1 % of the entries take about a byte each.
    assert index_bytes < 1.1 * count
    assert workers.network.meters[0].sent_bytes < 2 * 4 * count + 1.1 * count


def test_other_ranks_only_give_the_layout_of_the_first_round() -> None:
    codec = parse(HALF)
    ef = EFInput(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rounds = LeaderExchange(codec).rounds(ef, {}, EncodeContext((4,), rank=1, world_size=2))
    request = next(rounds)
    assert isinstance(request, Broadcast)
    assert request.root == 0
    assert not request.parts[0].any()


def test_invalid_indices_are_refused() -> None:
    codec = parse(HALF)
    rounds = LeaderExchange(codec).rounds(EFInput(torch.ones(4)), {}, EncodeContext((4,)))
    request = next(rounds)
    assert isinstance(request, Broadcast)
    assert request.layout.check is not None
    request.layout.check(request.parts)
    with pytest.raises(WireError):
        request.layout.check((torch.full_like(request.parts[0], 255),))


def test_small_tensors_share_the_collectives() -> None:
    sim = gradwire.simulate(
        {"w": torch.zeros(64, 64), "b": torch.zeros(8), "h": torch.zeros(9, dtype=torch.bfloat16)},
        "topk:ratio=0.1",
        workers=3,
        exchange="leader",
    )
    grads = [
        {"w": noise(64, 64, seed=r), "b": noise(8, seed=r), "h": torch.ones(9).bfloat16()}
        for r in range(3)
    ]
    means = sim.step(grads)
    torch.testing.assert_close(means["b"], sum(g["b"] for g in grads) / 3)
    torch.testing.assert_close(means["h"], torch.ones(9).bfloat16())
    assert 0 < means["w"].count_nonzero() <= 410
    assert sim.stats()["calls"] == 2
    assert sim.stats()["exchange"] == "leader"


def test_several_tensors_share_their_collectives() -> None:
    lanes = [
        [
            open_lane(
                str(lane),
                parse(HALF),
                parse_memory("residual"),
                "leader",
                EncodeContext((6,), rank, 2, lane_id=lane),
                torch.device("cpu"),
            )
            for lane in range(3)
        ]
        for rank in range(2)
    ]
    network = Simulated(2)
    network.run(
        [run_rounds([lane_rounds(noise(6, seed=r), x) for x in lanes[r]]) for r in range(2)]
    )
    assert network.meters[0].calls == 2


def test_dense_casts_wait_for_the_second_round() -> None:
    rounds = LeaderExchange(parse("none")).rounds(EFInput(torch.ones(3)), {}, EncodeContext((3,)))
    assert next(rounds) == Mean(())


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_reaches_the_common_optimum(memory: str) -> None:
    """Noise-free descent among workers whose optima differ by a tenth."""
    optima = noise(40, seed=3) + 0.1 * noise(4, 40, seed=2)
    workers = Lockstep("topk:ratio=0.1", memory, "leader", 40, size=4)
    assert distance_after(workers, optima, 300, rate=0.05) < 0.02


def test_a_nonfinite_entry_is_sent_when_its_rank_leads_and_then_dropped() -> None:
    workers = Lockstep("topk:ratio=0.1", "residual", "leader", 40, size=2)
    with_bad_entry = noise(2, 40)
    with_bad_entry[:, 7] = torch.tensor([0.0, float("nan")])
    workers.step(*with_bad_entry)
    assert workers.step(*noise(2, 40, seed=1))[7].isnan()
    assert workers.stacked_state("residual").isfinite().all()
    assert workers.step(*noise(2, 40, seed=2)).isfinite().all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topk:ratio=0.1 | qsgd", "no second method can encode them"),
        ("randomk:ratio=0.1", "all ranks know its indices already; use mean"),
        ("threshold:value=0.1", "only the leader would know how many indices it sends"),
        ("efsign", "it selects no indices that a leader could send"),
        ("powersgd", "it selects no indices that a leader could send"),
        ("none", "it selects no indices that a leader could send"),
    ],
)
def test_other_methods_are_refused_with_the_reason(spec: str, reason: str) -> None:
    message = f"does not go with exchange 'leader': .*{re.escape(reason)}"
    with pytest.raises(ConfigError, match=message):
        gradwire.simulate({"w": torch.zeros(64, 64)}, spec, workers=2, exchange="leader")
