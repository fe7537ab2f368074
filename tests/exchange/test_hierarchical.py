"""Hierarchical: every node communicates as one rank that holds the mean of its ranks."""

import re

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.state import load_resized, save
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, format_spec, parse
from lockstep import Lockstep, distance_after, noise

USUAL = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
STATELESS = [spec for spec in USUAL if not parse(spec).traits().accumulates]
PAIRS = [(2, 3), (3, 2)]
"""Nodes, and ranks per node: six ranks in both cases."""

TOP1 = "topk:ratio=0.5,values=fp32"


def two_level(node: int, between: str) -> str:
    return f"hierarchical:node={node},between={between}"


def test_two_steps_by_hand() -> None:
    """Two nodes of two ranks; each node sends one of two entries."""
    workers = Lockstep(TOP1, "residual", two_level(2, "gather"), 2, size=4)
    grads = torch.tensor([[6.0, 1.0], [2.0, 4.0], [1.0, -7.0], [0.0, -1.0]])
    # The means are (4, 2.5) and (0.5, -4): one node sends its first entry, the other its second.
    assert workers.step(*grads).tolist() == [2.0, -2.0]
    # A node sends an entry for all its ranks; of the other entry each rank keeps its own residual.
    assert workers.stacked_state("residual").tolist() == [
        [0.0, 1.0],
        [0.0, 4.0],
        [1.0, 0.0],
        [0.0, 0.0],
    ]
    # With the residuals, (0, 2.5) and (0.5, 0), the means are (4, 5) and (1, -4).
    assert workers.step(*grads).tolist() == [0.0, 0.5]
    assert workers.stacked_state("residual").tolist() == [
        [6.0, 0.0],
        [2.0, 0.0],
        [2.0, 0.0],
        [0.0, 0.0],
    ]


def test_the_residual_of_a_sent_entry_is_shared_in_the_node() -> None:
    """The scale of the node is (3 + 1) / 2, so an entry of mean 3 leaves a residual of 1."""
    workers = Lockstep("efsign", "residual", two_level(2, "gather"), 2, size=2)
    assert workers.step(torch.tensor([5.0, 1.0]), torch.tensor([1.0, 1.0])).tolist() == [2.0, 2.0]
    assert workers.stacked_state("residual").tolist() == [[1.0, -1.0], [1.0, -1.0]]


def mean_of(grads: Tensor) -> Tensor:
    """Returns the mean of the rows, summed in the order of simulated ranks."""
    mean = grads[0] / len(grads)
    for grad in grads[1:]:
        mean = mean + grad / len(grads)
    return mean


@pytest.mark.parametrize(("nodes", "node"), [(2, 2), *PAIRS], ids=str)
@pytest.mark.parametrize("spec", STATELESS)
def test_nodes_are_equal_to_ranks_with_their_mean(spec: str, nodes: int, node: int) -> None:
    """Bitwise, for every method, with the exchange that the plan picks between nodes."""
    like = [torch.zeros(40, 33)]
    exchange = str(
        make_plan(spec, "none", f"hierarchical:node={node}", like, nodes * node).exchange
    )
    between = str(make_plan(spec, "none", "auto", like, nodes).exchange)
    assert exchange == two_level(node, between)
    many = Lockstep(spec, "none", exchange, 1320, nodes * node)
    few = Lockstep(spec, "none", between, 1320, nodes)
    for step in range(3):
        grads = noise(nodes, node, 1320, seed=step)
        assert torch.equal(many.step(*grads.flatten(0, 1)), few.step(*map(mean_of, grads)))


@pytest.mark.parametrize(("nodes", "node"), PAIRS, ids=str)
@pytest.mark.parametrize("spec", USUAL)
def test_every_method_with_its_own_memory(spec: str, nodes: int, node: int) -> None:
    sim = gradwire.simulate(
        {"w": torch.zeros(40, 33), "b": torch.zeros(9)},
        spec,
        workers=nodes * node,
        exchange=f"hierarchical:node={node}",
    )
    for step in range(2):
        grads = noise(nodes * node, 1329, seed=step)
        means = sim.step([{"w": g[:1320].view(40, 33), "b": g[1320:]} for g in grads])
        assert means["w"].isfinite().all()
        assert means["w"].count_nonzero() > 0
    if "majority" not in str(sim.stats()["exchange"]) and parse(spec) != parse("signum"):
        tolerance = 1e-2 if spec in ("bf16", "fp16") else 1e-5
        expected = noise(nodes * node, 1329, seed=1)[:, 1320:].mean(dim=0)
        torch.testing.assert_close(means["b"], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("nodes", "node"), [*PAIRS, (1, 4), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("between", ["gather", "sharded", "leader"])
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_sent_plus_residual_equals_the_input(
    between: str, nodes: int, node: int, numel: int
) -> None:
    exchange = two_level(node, between)
    workers = Lockstep("topk:ratio=0.1,values=bf16", "residual", exchange, numel, size=nodes * node)
    sent, total = torch.zeros(numel), torch.zeros(numel)
    for step in range(12):
        grads = noise(nodes * node, numel, seed=step)
        sent, total = sent + workers.step(*grads), total + grads.mean(dim=0)
    residual = workers.stacked_state("residual").mean(dim=0)
    for place, lane in enumerate(workers.lanes[::node]):
        if "server" in lane.aggregator_state:
            start, stop = numel * place // nodes, numel * (place + 1) // nodes
            residual[start:stop] += lane.aggregator_state["server"]
    torch.testing.assert_close(sent + residual, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_comes_as_close_to_the_optimum_as_one_rank_per_node(memory: str) -> None:
    """Noise-free descent among workers whose optima differ."""
    optima = noise(2, 2, 40, seed=2)
    many = Lockstep("topk:ratio=0.1", memory, two_level(2, "gather"), 40, size=4)
    few = Lockstep("topk:ratio=0.1", memory, "gather", 40, size=2)
    distance = distance_after(many, optima.flatten(0, 1), 200, rate=0.03)
    assert distance < 1.1 * distance_after(few, optima.mean(dim=1), 200, rate=0.03) < 0.15


def test_momentum_is_masked_where_the_node_has_sent_an_entry() -> None:
    workers = Lockstep("topk:ratio=0.1", "momentum", two_level(2, "gather"), 100, size=4)
    workers.step(*noise(4, 100))
    masked = workers.stacked_state("momentum") == 0
    assert masked.sum(dim=1).tolist() == [10] * 4
    assert torch.equal(masked[0], masked[1])
    assert torch.equal(masked[2], masked[3])
    assert not torch.equal(masked[0], masked[2])


@pytest.mark.parametrize(("nodes", "node"), [(2, 2), (2, 3), (3, 2), (8, 4), (2, 8)], ids=str)
def test_bytes_between_nodes_are_a_share_of_a_gather(nodes: int, node: int) -> None:
    """Inside: a ring of 4 bytes per entry, and each message once; between: a share of N-1."""
    numel = 10_000
    workers = Lockstep("topk:ratio=0.01", "none", two_level(node, "gather"), numel, nodes * node)
    workers.step(*noise(nodes * node, numel))
    share = -(-parse("topk:ratio=0.01").nbytes((numel,)) // node)
    dense = 2 * (node - 1) * 4 * numel // node
    for meter in workers.network.meters:
        assert meter.calls == 3
        assert meter.inside_bytes == dense + (node - 1) * nodes * share
        assert meter.sent_bytes - meter.inside_bytes == (nodes - 1) * share
        assert meter.received_bytes == meter.sent_bytes


def test_bytes_between_nodes_stay_flat_when_sharded() -> None:
    """Signs of 81,920 entries are 10,240 bytes, plus a scale per shard; a node sends that twice."""
    for nodes in (2, 4, 8):
        workers = Lockstep("efsign", "none", two_level(2, "sharded"), 81_920, 2 * nodes)
        workers.step(*noise(2 * nodes, 81_920))
        shard = 10_240 // nodes + 4
        for meter in workers.network.meters:
            assert meter.sent_bytes - meter.inside_bytes == 2 * (nodes - 1) * shard // 2


def test_stats_count_the_bytes_inside_nodes() -> None:
    like, grads = {"w": torch.zeros(64, 64)}, [{"w": noise(64, 64, seed=r)} for r in range(4)]
    sim = gradwire.simulate(like, "efsign", workers=4, exchange="hierarchical:node=2")
    sim.step(grads)
    stats = sim.stats()
    # One message of signs, a scale and the flag, shared by two ranks.
    assert int(str(stats["sent_bytes"])) - int(str(stats["inside_bytes"])) == (512 + 4 + 4) // 2
    assert stats["exchange"] == "hierarchical:node=2,between=gather"
    flat = gradwire.simulate(like, "efsign", workers=4)
    flat.step(grads)
    assert flat.stats()["inside_bytes"] == 0


def test_small_tensors_share_the_collectives() -> None:
    sim = gradwire.simulate(
        {"w": torch.zeros(64, 64), "b": torch.zeros(8), "h": torch.zeros(9, dtype=torch.bfloat16)},
        "powersgd:rank=2",
        workers=4,
        exchange="hierarchical:node=2",
    )
    grads = [
        {"w": noise(64, 64, seed=r), "b": noise(8, seed=r), "h": torch.ones(9).bfloat16()}
        for r in range(4)
    ]
    means = sim.step(grads)
    torch.testing.assert_close(means["b"], sum(g["b"] for g in grads) / 4)
    torch.testing.assert_close(means["h"], torch.ones(9).bfloat16())
    # One mean inside; two rounds of PowerSGD, each between nodes and inside.
    assert sim.stats()["calls"] == 5
    assert sim.stats()["exchange"] == "hierarchical:node=2,between=mean"


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd", "qsgd"])
def test_a_nonfinite_flag_reaches_all_nodes_and_leaves_no_trace(spec: str) -> None:
    """The flag is exchanged inside the node first, then between nodes."""
    like, exchange = {"w": torch.zeros(64, 64)}, "hierarchical:node=2"
    sims = [gradwire.simulate(like, spec, workers=4, exchange=exchange) for _ in range(2)]
    with_bad_entry = [{"w": noise(64, 64, seed=rank)} for rank in range(4)]
    with_bad_entry[3]["w"][7, 7] = float("nan")
    assert not sims[0].step(with_bad_entry)["w"].isfinite().all()
    assert sims[0].stats()["skipped"] == 1
    good = [{"w": noise(64, 64, seed=rank + 9)} for rank in range(4)]
    assert torch.equal(sims[0].step(good)["w"], sims[1].step(good)["w"])


@pytest.mark.parametrize(
    ("spec", "key"), [("efsign", "server"), ("signum", "momentum")], ids=["shards", "whole"]
)
def test_a_run_resumes_with_another_number_of_nodes(spec: str, key: str) -> None:
    """The ranks of a node have equal state again, and shards are redistributed by node."""
    like = {"w": torch.zeros(40, 33)}
    exchange = "hierarchical:node=2,between=" + ("sharded" if key == "server" else "gather")
    sim = gradwire.simulate(like, spec, workers=6, exchange=exchange)
    sim.step([{"w": noise(40, 33, seed=rank)} for rank in range(6)])
    states = [save(worker) for worker in sim.workers]
    saved = [worker.lanes["w"].aggregator_state[key] for worker in sim.workers]
    fewer = gradwire.simulate(like, spec, workers=4, exchange=exchange)
    for worker in fewer.workers:
        load_resized(worker, states, "redistribute")
    loaded = [worker.lanes["w"].aggregator_state[key] for worker in fewer.workers]
    assert torch.equal(loaded[0], loaded[1])
    assert torch.equal(loaded[2], loaded[3])
    if key == "server":
        assert torch.equal(torch.cat(loaded[::2]), torch.cat(saved[::2]))
    else:
        assert torch.equal(loaded[2], saved[2])
    mean = fewer.step([{"w": noise(40, 33, seed=rank)} for rank in range(4)])["w"]
    assert mean.isfinite().all()
    assert mean.any()


@pytest.mark.parametrize(
    ("spec", "exchange", "message"),
    [
        (
            "efsign",
            "hierarchical:node=4",
            "hierarchical: 6 ranks do not make nodes of 4; node must divide the number of ranks",
        ),
        ("efsign", "hierarchical", "hierarchical: missing parameter ['node']"),
        ("efsign", "hierarchical:node=0", "hierarchical: node must be at least 1, got 0"),
        ("efsign", "hierarchical:node=two", "hierarchical: node must be of type int, got 'two'"),
        (
            "efsign",
            "hierarchical:nodes=2",
            "hierarchical: unknown parameter ['nodes'], expected ['between', 'node']",
        ),
        (
            "efsign",
            "hierarchical:node=2,between=gathr",
            "no exchange named 'gathr'; did you mean 'gather'?",
        ),
        (
            "efsign",
            "hierarchical:node=2,between=hierarchical",
            "hierarchical: between must have one level, got 'hierarchical'",
        ),
        (
            "efsign",
            "hierarchical:node=2,between=mean",
            "efsign does not go with exchange 'mean': its messages cannot be summed",
        ),
        (
            "signsgd",
            "hierarchical:node=2,between=sharded",
            "signsgd does not go with exchange 'sharded': votes must be counted on one rank",
        ),
        (
            "powersgd",
            "hierarchical:node=2,between=gather",
            "powersgd does not go with exchange 'gather': it defines its own rounds",
        ),
    ],
)
def test_illegal_exchanges_are_refused(spec: str, exchange: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_plan(spec, None, exchange, [torch.zeros(64, 64)], 6)
