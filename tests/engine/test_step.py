"""The main path: lanes share collectives, messages vary in length, corrupt bytes are refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradwire.base import OneRound, Traits
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import open_lane
from gradwire.engine.step import BucketResult, Lane, lane_rounds, run_rounds
from gradwire.errors import WireError
from gradwire.exchange.sharded import bounds
from gradwire.memory.residual import Residual
from gradwire.spec import memory_classes, parse, parse_memory
from gradwire.types import (
    AllGather,
    AllToAll,
    Broadcast,
    EncodeContext,
    Field,
    Layout,
    Mean,
    Parts,
    Request,
    Rounds,
)
from gradwire.wire.layout import max_bytes

CPU = torch.device("cpu")
TWO = Layout((Field(torch.float32, 2),))


@dataclass(frozen=True)
class AboveLimit(OneRound):
    """Sends the entries of magnitude `limit` and above: only the sender knows how many."""

    limit: float = 1.0

    examples: ClassVar = ({},)
    family: ClassVar = "sparsification"
    paper: ClassVar = "none"

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        def check(parts: Parts) -> None:
            index, values = parts
            if index.shape != values.shape or bool(((index < 0) | (index >= numel)).any()):
                raise WireError("indices outside the tensor")

        fields = (Field(torch.int32, None), Field(torch.float32, None))
        return Layout(fields, check, max_bytes(numel))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        index = (x.abs() >= self.limit).nonzero().view(-1)
        return index.to(torch.int32), x[index]

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        for index, values in messages:
            out.index_add_(0, index.long(), values, alpha=weight)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounds(*requests: Request) -> Rounds:
    """Yields one request per round, and returns the answers, flat."""
    received = [torch.zeros(0)]
    for request in requests:
        answer = yield request
        received += [part.reshape(-1) for parts in answer for part in parts]
    return torch.cat(received)


def collectives_of(lanes: list[Rounds]) -> tuple[list[Collective], list[Tensor]]:
    """Returns the collectives of one rank, each answered by its own buffers, and the results."""
    collectives: list[Collective] = []
    program = run_rounds(lanes)
    answer: list[Tensor] | None = None
    while True:
        try:
            collective = program.send(answer) if answer is not None else next(program)
        except StopIteration as end:
            return collectives, end.value.means
        collectives.append(collective)
        answer = collective.buffers


def floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def mean(*values: float) -> Mean:
    return Mean((floats(values),))


def gather(*values: float) -> AllGather:
    return AllGather((floats(values),), TWO, [TWO])


def scatter(*values: float) -> AllToAll:
    return AllToAll([(floats(values),)], [TWO], 0)


def broadcast(*values: float) -> Broadcast:
    return Broadcast((floats(values),), TWO, 0)


def test_requests_of_one_kind_share_one_collective_and_buffer() -> None:
    collectives, results = collectives_of(
        [rounds(mean(1, 2)), rounds(mean(3)), rounds(mean(4, 5, 6))]
    )
    assert [(c.kind, len(c.buffers)) for c in collectives] == [("mean", 1)]
    assert collectives[0].buffers[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert [r.tolist() for r in results] == [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize("in_reverse", [False, True])
def test_one_collective_per_kind_in_a_fixed_order(in_reverse: bool) -> None:
    requests: list[Callable[..., Request]] = [broadcast, scatter, gather, mean, gather, mean]
    requests = requests[::-1] if in_reverse else requests
    lanes = [rounds(request(lane, lane)) for lane, request in enumerate(requests)]
    collectives, results = collectives_of(lanes)
    assert [c.kind for c in collectives] == ["mean", "gather", "all_to_all", "broadcast"]
    assert [sum(b.nbytes for b in c.buffers) for c in collectives] == [16, 16, 8, 8]
    assert [r.tolist() for r in results] == [[lane, lane] for lane in range(6)]


def test_known_sizes_are_part_of_the_collective() -> None:
    collectives, _ = collectives_of(
        [rounds(gather(1, 2)), rounds(gather(3, 4)), rounds(scatter(5, 6))]
    )
    assert [c.sizes for c in collectives] == [[16], [8]]


def test_a_lane_that_finishes_early_does_not_block_the_others() -> None:
    collectives, results = collectives_of(
        [
            rounds(mean(1), mean(2), mean(3)),
            rounds(mean(4)),
            rounds(),
            rounds(mean(5), gather(6, 7)),
        ]
    )
    assert [c.kind for c in collectives] == ["mean", "mean", "gather", "mean"]
    assert [c.buffers[0].numel() for c in collectives[:2]] == [3, 1]
    assert [r.tolist() for r in results] == [[1, 2, 3], [4], [], [5, 6, 7]]


def test_no_lanes_make_no_collective() -> None:
    assert collectives_of([]) == ([], [])


def test_empty_messages_make_no_collective() -> None:
    none = Layout((Field(torch.float32, 0),))
    empty = torch.zeros(0)
    collectives, _ = collectives_of(
        [rounds(Mean((empty,))), rounds(AllGather((empty,), none, [none]))]
    )
    assert collectives == []


def test_broadcasts_of_different_roots_reach_all_ranks() -> None:
    def program(rank: int) -> CollectiveProgram[BucketResult]:
        own = torch.full((2,), float(rank))
        return run_rounds([rounds(Broadcast((own,), TWO, root)) for root in (0, 1)])

    results = Simulated(2).run([program(rank) for rank in range(2)])
    assert [[r.tolist() for r in row.means] for row in results] == [[[0, 0], [1, 1]]] * 2


def lanes_for(
    codec: OneRound | str, exchange_name: str, size: int, numel: int, memory: str = "residual"
) -> list[Lane]:
    built = parse(codec) if isinstance(codec, str) else codec
    contexts = [EncodeContext((numel,), rank, size) for rank in range(size)]
    return [
        open_lane("w", built, parse_memory(memory), exchange_name, ctx, CPU) for ctx in contexts
    ]


def run(lanes: list[Lane], grads: list[Tensor]) -> tuple[list[Tensor], Simulated]:
    outs = [grad.clone() for grad in grads]
    network = Simulated(len(lanes))
    network.run([run_rounds([lane_rounds(g, lane)]) for g, lane in zip(outs, lanes, strict=True)])
    for lane in lanes:
        lane.commit()
    return outs, network


def example_gradients() -> list[Tensor]:
    """The first rank has no entry to send, the second has two, the third five."""
    small = torch.full((10,), 0.25)
    two, five = small.clone(), small.clone()
    two[[1, 8]] = torch.tensor([9.0, -12.0])
    five[[0, 1, 2, 8, 9]] = torch.tensor([6.0, 6.0, -30.0, 12.0, 3.0])
    return [small, two, five]


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_ranks_may_send_messages_of_different_lengths(exchange_name: str) -> None:
    lanes = lanes_for(AboveLimit(), exchange_name, 3, 10)
    outs, _ = run(lanes, example_gradients())
    for out in outs:
        assert torch.equal(out, outs[0])
    torch.testing.assert_close(outs[0], torch.tensor([2.0, 5, -10, 0, 0, 0, 0, 0, 0, 1]))
    for lane, grad in zip(lanes, example_gradients(), strict=True):
        assert torch.equal(lane.memory_state["residual"], torch.where(grad.abs() < 1, grad, 0.0))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_all_messages_may_be_empty(exchange_name: str) -> None:
    lanes = lanes_for(AboveLimit(limit=100.0), exchange_name, 3, 10)
    outs, _ = run(lanes, example_gradients())
    assert torch.equal(outs[0], torch.zeros(10))
    assert torch.equal(lanes[2].memory_state["residual"], example_gradients()[2])


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_small_entries_accumulate_until_they_are_sent(exchange_name: str) -> None:
    lanes = lanes_for(AboveLimit(), exchange_name, 3, 10)
    sent = torch.zeros(10)
    for _ in range(8):
        outs, _ = run(lanes, example_gradients())
        sent += outs[0]
    for lane, (start, stop) in zip(lanes, bounds(10, 3), strict=True):
        # The residual of the rank that averages a shard has yet to be sent too.
        sent[start:stop] += lane.aggregator_state.get("server", torch.zeros(stop - start))
    torch.testing.assert_close(sent, sum(example_gradients()) * 8 / 3)


def test_bytes_of_messages_of_variable_length() -> None:
    """Buffer sizes travel first; then each buffer, with two lengths and two parts of 5 entries."""
    _, network = run(lanes_for(AboveLimit(), "gather", 3, 10), example_gradients())
    longest = 2 * 4 + 5 * 4 + 5 * 4
    assert network.meters[0].sent_bytes == 2 * 8 + 2 * longest
    assert AboveLimit().encode(example_gradients()[2]).nbytes == longest
    assert AboveLimit().nbytes((10,)) == 8


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_fixed_and_variable_lengths_share_a_message(exchange_name: str) -> None:
    """Lanes of fixed length share the collectives of a lane of variable length."""
    size = 3
    specs: list[OneRound | str] = [AboveLimit(), "efsign", "none", AboveLimit(limit=5.0)]
    rows = [lanes_for(spec, exchange_name, size, 10, "none") for spec in specs]
    alone = [
        run(lanes_for(spec, exchange_name, size, 10, "none"), example_gradients())[0]
        for spec in specs
    ]
    outs = [[g.clone() for g in example_gradients()] for _ in specs]
    network = Simulated(size)
    network.run(
        [
            run_rounds([lane_rounds(outs[i][rank], rows[i][rank]) for i in range(len(specs))])
            for rank in range(size)
        ]
    )
    for shared, own in zip(outs, alone, strict=True):
        assert torch.equal(shared[0], own[0])


def two_ranks(
    spec: OneRound | str, exchange_name: str, memory: str
) -> tuple[list[Tensor], list[Lane]]:
    lanes = lanes_for(spec, exchange_name, 2, 100, memory)
    return [normal(100, seed=rank) for rank in range(2)], lanes


def run_by_hand(
    programs: list[CollectiveProgram[BucketResult]],
    corrupt: Callable[[Tensor], Tensor],
    bad_round: int,
) -> None:
    """Runs two ranks by hand; the message of rank 1 in one round arrives corrupt at rank 0."""
    collectives = [next(program) for program in programs]
    for number in range(3):
        if collectives[0].kind == "gather":
            received = [[c.buffers[0].clone() for c in collectives] for _ in programs]
        else:
            received = [[c.buffers[rank].clone() for c in collectives] for rank in range(2)]
        if number == bad_round:
            received[0][1] = corrupt(received[0][1])
        collectives = [
            program.send(answer) for program, answer in zip(programs, received, strict=True)
        ]


def state_copies(lane: Lane) -> list[Tensor]:
    """Returns copies of the state that a lane keeps for later steps."""
    return [t.clone() for t in (*lane.memory_state.values(), *lane.aggregator_state.values())]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def wrong_positions(buffer: Tensor) -> Tensor:
    return torch.cat([torch.full_like(buffer[:4], 255), buffer[4:]])


def too_short(buffer: Tensor) -> Tensor:
    return buffer[:-4]


def too_long(buffer: Tensor) -> Tensor:
    return torch.cat([buffer, buffer[:4]])


@pytest.mark.parametrize(
    ("exchange_name", "bad_round"), [("gather", 0), ("sharded", 0), ("sharded", 1)], ids=str
)
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize(
    ("spec", "corrupt"),
    [
        ("topk:ratio=0.1", wrong_positions),
        ("topk:ratio=0.1", too_short),
        ("topk:ratio=0.1", too_long),
        ("efsign", too_short),
        ("qsgd:bits=8", too_long),
        (AboveLimit(), wrong_positions),
        (AboveLimit(), too_short),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_a_corrupt_message_raises_and_leaves_the_gradient_unchanged(
    spec: OneRound | str,
    corrupt: Callable[[Tensor], Tensor],
    memory: str,
    exchange_name: str,
    bad_round: int,
) -> None:
    grads, lanes = two_ranks(spec, exchange_name, memory)
    # After a good step there is state.
    run(lanes, [normal(100, seed=9 + rank) for rank in range(2)])
    before = state_copies(lanes[0])
    outs = [grad.clone() for grad in grads]
    programs = [run_rounds([lane_rounds(g, lane)]) for g, lane in zip(outs, lanes, strict=True)]
    with pytest.raises(WireError):
        run_by_hand(programs, corrupt, bad_round)
    assert torch.equal(outs[0].view(torch.int32), grads[0].view(torch.int32))
    assert lanes[0].ctx.step == 1
    assert_same(state_copies(lanes[0]), before)


@pytest.mark.parametrize(("exchange_name", "bad_round"), [("gather", 0), ("sharded", 1)], ids=str)
@pytest.mark.parametrize("memory", [m for m in memory_classes() if m not in ("none", "residual")])
def test_a_corrupt_message_leaves_the_state_unchanged(
    memory: str, exchange_name: str, bad_round: int
) -> None:
    grads, lanes = two_ranks("topk:ratio=0.1", exchange_name, memory)
    twins = lanes_for("topk:ratio=0.1", exchange_name, 2, 100, memory)
    first = [normal(100, seed=9 + rank) for rank in range(2)]
    run(lanes, first)
    run(twins, first)
    before = [state_copies(lane) for lane in lanes]
    outs = [grad.clone() for grad in grads]
    programs = [run_rounds([lane_rounds(g, lane)]) for g, lane in zip(outs, lanes, strict=True)]
    with pytest.raises(WireError):
        run_by_hand(programs, too_short, bad_round)
    assert torch.equal(outs[0].view(torch.int32), grads[0].view(torch.int32))
    for lane, kept in zip(lanes, before, strict=True):
        assert_same(state_copies(lane), kept)
    assert torch.equal(run(lanes, grads)[0][0], run(twins, grads)[0][0])


def test_good_messages_are_not_refused() -> None:
    """Shows that `run_by_hand` is correct if nothing is corrupted."""
    grads, lanes = two_ranks("topk:ratio=0.1", "sharded", "residual")
    expected, _ = run(lanes_for("topk:ratio=0.1", "sharded", 2, 100), grads)
    programs = [run_rounds([lane_rounds(g, lane)]) for g, lane in zip(grads, lanes, strict=True)]
    with pytest.raises(StopIteration):
        run_by_hand(programs, lambda buffer: buffer, 0)
    assert torch.equal(grads[0], expected[0])


def test_the_error_is_measured_at_the_first_step() -> None:
    lanes = lanes_for("topk:ratio=0.5,values=fp32", "gather", 1, 4)
    run(lanes, [torch.tensor([3.0, 4.0, 0.0, 0.0])])
    assert lanes[0].relative_error == 0
    lanes = lanes_for("topk:ratio=0.25,values=fp32", "gather", 1, 2, "none")
    run(lanes, [torch.tensor([3.0, 4.0])])
    assert lanes[0].relative_error is not None
    assert float(lanes[0].relative_error) == pytest.approx(3 / 5)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "efsign", "fp16"])
def test_measuring_the_error_does_not_change_the_result(spec: str) -> None:
    grads = [normal(100, seed=rank) for rank in range(2)]
    exchange_name = "mean" if spec == "fp16" else "gather"
    measured, _ = run(lanes_for(spec, exchange_name, 2, 100, "none"), grads)
    lanes = lanes_for(spec, exchange_name, 2, 100, "none")
    for lane in lanes:
        lane.sample_every = 1 << 40
        lane.ctx = lane.ctx._replace(step=1)
    plain, _ = run(lanes, grads)
    assert torch.equal(measured[0], plain[0])
    assert lanes[0].relative_error is None


def test_adjacent_gradients_are_averaged_in_place() -> None:
    """A bucket without compression is one collective on its own memory."""
    buckets = [torch.arange(10.0) + rank for rank in range(2)]
    contexts = [EncodeContext((5,), rank, 2, step=1) for rank in range(2)]
    lanes = [
        [open_lane(n, parse("none"), parse_memory("none"), "mean", ctx, CPU) for n in ("a", "b")]
        for ctx in contexts
    ]
    programs = [
        run_rounds([lane_rounds(bucket[:5], row[0]), lane_rounds(bucket[5:], row[1])])
        for bucket, row in zip(buckets, lanes, strict=True)
    ]
    collectives = [next(program) for program in programs]
    assert collectives[0].buffers[0].data_ptr() == buckets[0].data_ptr()
    assert collectives[0].buffers[0].numel() == 10


def test_a_residual_is_not_shared_between_lanes() -> None:
    lanes = lanes_for("topk:ratio=0.1", "gather", 2, 100)
    run(lanes, [normal(100, seed=rank) for rank in range(2)])
    assert isinstance(lanes[0].memory, Residual)
    assert not torch.equal(lanes[0].memory_state["residual"], lanes[1].memory_state["residual"])
