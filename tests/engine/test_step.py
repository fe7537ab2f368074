"""The main path: lanes that share their calls, messages of any length, and bytes gone bad."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradwire.base import OneRound, Traits
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.simulated import Simulated
from gradwire.engine.plan import open_lane
from gradwire.engine.step import Lane, exchange, together
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
class Loud(OneRound):
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
                raise WireError("positions outside the tensor")

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


def say(*requests: Request) -> Rounds:
    """Makes the requests one a round, and returns all that was answered, flat."""
    heard = [torch.zeros(0)]
    for request in requests:
        answer = yield request
        heard += [part.reshape(-1) for parts in answer for part in parts]
    return torch.cat(heard)


def calls_of(talks: list[Rounds]) -> tuple[list[Collective], list[Tensor]]:
    """The calls of a lone rank, each answered by what it said, and the results."""
    calls: list[Collective] = []
    conversation = together(talks)
    answer: list[Tensor] | None = None
    while True:
        try:
            call = conversation.send(answer) if answer is not None else next(conversation)
        except StopIteration as end:
            return calls, end.value
        calls.append(call)
        answer = call.buffers


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


def test_requests_of_one_kind_are_one_call_with_one_buffer() -> None:
    calls, results = calls_of([say(mean(1, 2)), say(mean(3)), say(mean(4, 5, 6))])
    assert [(call.kind, len(call.buffers)) for call in calls] == [("mean", 1)]
    assert calls[0].buffers[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert [r.tolist() for r in results] == [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize("turned", [False, True])
def test_one_call_a_kind_in_an_order_that_is_always_the_same(turned: bool) -> None:
    requests: list[Callable[..., Request]] = [broadcast, scatter, gather, mean, gather, mean]
    requests = requests[::-1] if turned else requests
    talks = [say(request(lane, lane)) for lane, request in enumerate(requests)]
    calls, results = calls_of(talks)
    assert [call.kind for call in calls] == ["mean", "gather", "scatter", "broadcast"]
    assert [sum(b.nbytes for b in call.buffers) for call in calls] == [16, 16, 8, 8]
    assert [r.tolist() for r in results] == [[lane, lane] for lane in range(6)]


def test_sizes_are_told_beforehand_where_they_are_known() -> None:
    calls, _ = calls_of([say(gather(1, 2)), say(gather(3, 4)), say(scatter(5, 6))])
    assert [call.sizes for call in calls] == [[16], [8]]


def test_a_lane_that_finishes_early_does_not_hold_the_others() -> None:
    calls, results = calls_of(
        [say(mean(1), mean(2), mean(3)), say(mean(4)), say(), say(mean(5), gather(6, 7))]
    )
    assert [call.kind for call in calls] == ["mean", "mean", "gather", "mean"]
    assert [call.buffers[0].numel() for call in calls[:2]] == [3, 1]
    assert [r.tolist() for r in results] == [[1, 2, 3], [4], [], [5, 6, 7]]


def test_no_lanes_no_calls() -> None:
    assert calls_of([]) == ([], [])


def test_nothing_to_say_is_no_call() -> None:
    none = Layout((Field(torch.float32, 0),))
    empty = torch.zeros(0)
    calls, _ = calls_of([say(Mean((empty,))), say(AllGather((empty,), none, [none]))])
    assert calls == []


def test_broadcasts_of_different_roots_reach_everyone() -> None:
    def talks(rank: int) -> CollectiveProgram[list[Tensor]]:
        own = torch.full((2,), float(rank))
        return together([say(Broadcast((own,), TWO, root)) for root in (0, 1)])

    results = Simulated(2).run([talks(rank) for rank in range(2)])
    assert [[r.tolist() for r in row] for row in results] == [[[0, 0], [1, 1]]] * 2


def lanes_for(
    codec: OneRound | str, way: str, size: int, numel: int, memory: str = "residual"
) -> list[Lane]:
    built = parse(codec) if isinstance(codec, str) else codec
    contexts = [EncodeContext((numel,), rank, size) for rank in range(size)]
    return [open_lane("w", built, parse_memory(memory), way, ctx, CPU) for ctx in contexts]


def run(lanes: list[Lane], grads: list[Tensor]) -> tuple[list[Tensor], Simulated]:
    outs = [grad.clone() for grad in grads]
    network = Simulated(len(lanes))
    network.run([together([exchange(g, lane)]) for g, lane in zip(outs, lanes, strict=True)])
    for lane in lanes:
        lane.keep()
    return outs, network


def loud_gradients() -> list[Tensor]:
    """The first rank has nothing to say, the second two entries, the third five."""
    quiet = torch.full((10,), 0.25)
    two, five = quiet.clone(), quiet.clone()
    two[[1, 8]] = torch.tensor([9.0, -12.0])
    five[[0, 1, 2, 8, 9]] = torch.tensor([6.0, 6.0, -30.0, 12.0, 3.0])
    return [quiet, two, five]


@pytest.mark.parametrize("way", ["gather", "sharded"])
def test_ranks_may_say_messages_of_different_lengths(way: str) -> None:
    lanes = lanes_for(Loud(), way, 3, 10)
    outs, _ = run(lanes, loud_gradients())
    for out in outs:
        assert torch.equal(out, outs[0])
    torch.testing.assert_close(outs[0], torch.tensor([2.0, 5, -10, 0, 0, 0, 0, 0, 0, 1]))
    for lane, grad in zip(lanes, loud_gradients(), strict=True):
        assert torch.equal(lane.memory_state["residual"], torch.where(grad.abs() < 1, grad, 0.0))


@pytest.mark.parametrize("way", ["gather", "sharded"])
def test_nobody_has_anything_to_say(way: str) -> None:
    lanes = lanes_for(Loud(limit=100.0), way, 3, 10)
    outs, _ = run(lanes, loud_gradients())
    assert torch.equal(outs[0], torch.zeros(10))
    assert torch.equal(lanes[2].memory_state["residual"], loud_gradients()[2])


@pytest.mark.parametrize("way", ["gather", "sharded"])
def test_what_was_quiet_becomes_loud(way: str) -> None:
    lanes = lanes_for(Loud(), way, 3, 10)
    sent = torch.zeros(10)
    for _ in range(8):
        outs, _ = run(lanes, loud_gradients())
        sent += outs[0]
    for lane, (start, stop) in zip(lanes, bounds(10, 3), strict=True):
        # What the averaging rank of a shard still keeps is on its way too.
        sent[start:stop] += lane.aggregator_state.get("server", torch.zeros(stop - start))
    torch.testing.assert_close(sent, sum(loud_gradients()) * 8 / 3)


def test_bytes_of_messages_of_unknown_length() -> None:
    """Two lengths and twice the padded parts; the sizes of buffers first, then the longest."""
    _, network = run(lanes_for(Loud(), "gather", 3, 10), loud_gradients())
    longest = 2 * 4 + 5 * 4 + 5 * 4
    assert network.meters[0].sent_bytes == 2 * 8 + 2 * longest
    assert Loud().encode(loud_gradients()[2]).nbytes == longest
    assert Loud().nbytes((10,)) == 8


@pytest.mark.parametrize("way", ["gather", "sharded"])
def test_known_and_unknown_lengths_in_one_message(way: str) -> None:
    """Lanes of other methods share the calls of one with secret lengths."""
    size = 3
    specs: list[OneRound | str] = [Loud(), "efsign", "none", Loud(limit=5.0)]
    rows = [lanes_for(spec, way, size, 10, "none") for spec in specs]
    alone = [run(lanes_for(spec, way, size, 10, "none"), loud_gradients())[0] for spec in specs]
    outs = [[g.clone() for g in loud_gradients()] for _ in specs]
    network = Simulated(size)
    network.run(
        [
            together([exchange(outs[i][rank], rows[i][rank]) for i in range(len(specs))])
            for rank in range(size)
        ]
    )
    for together_, alone_ in zip(outs, alone, strict=True):
        assert torch.equal(together_[0], alone_[0])


def two_ranks(spec: OneRound | str, way: str, memory: str) -> tuple[list[Tensor], list[Lane]]:
    return [normal(100, seed=rank) for rank in range(2)], lanes_for(spec, way, 2, 100, memory)


def lead(
    talks: list[CollectiveProgram[list[Tensor]]], spoil: Callable[[Tensor], Tensor], bad_round: int
) -> None:
    """Leads two ranks by hand; what rank 1 says in one round arrives spoilt at rank 0."""
    calls = [next(talk) for talk in talks]
    for number in range(3):
        if calls[0].kind == "gather":
            heard = [[call.buffers[0].clone() for call in calls] for _ in talks]
        else:
            heard = [[call.buffers[rank].clone() for call in calls] for rank in range(2)]
        if number == bad_round:
            heard[0][1] = spoil(heard[0][1])
        calls = [talk.send(answer) for talk, answer in zip(talks, heard, strict=True)]


def remembered(lane: Lane) -> list[Tensor]:
    """Copies of all that a lane keeps for later steps."""
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
    ("way", "bad_round"), [("gather", 0), ("sharded", 0), ("sharded", 1)], ids=str
)
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize(
    ("spec", "spoil"),
    [
        ("topk:ratio=0.1", wrong_positions),
        ("topk:ratio=0.1", too_short),
        ("topk:ratio=0.1", too_long),
        ("efsign", too_short),
        ("qsgd:bits=8", too_long),
        (Loud(), wrong_positions),
        (Loud(), too_short),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_a_bad_message_is_refused_and_the_gradient_stays(
    spec: OneRound | str,
    spoil: Callable[[Tensor], Tensor],
    memory: str,
    way: str,
    bad_round: int,
) -> None:
    grads, lanes = two_ranks(spec, way, memory)
    # After a good step there is something to remember.
    run(lanes, [normal(100, seed=9 + rank) for rank in range(2)])
    before = remembered(lanes[0])
    outs = [grad.clone() for grad in grads]
    talks = [together([exchange(g, lane)]) for g, lane in zip(outs, lanes, strict=True)]
    with pytest.raises(WireError):
        lead(talks, spoil, bad_round)
    assert torch.equal(outs[0].view(torch.int32), grads[0].view(torch.int32))
    assert lanes[0].ctx.step == 1
    assert_same(remembered(lanes[0]), before)


@pytest.mark.parametrize(("way", "bad_round"), [("gather", 0), ("sharded", 1)], ids=str)
@pytest.mark.parametrize("memory", [m for m in memory_classes() if m not in ("none", "residual")])
def test_a_bad_message_is_as_if_the_step_had_not_been(
    memory: str, way: str, bad_round: int
) -> None:
    grads, lanes = two_ranks("topk:ratio=0.1", way, memory)
    twins = lanes_for("topk:ratio=0.1", way, 2, 100, memory)
    first = [normal(100, seed=9 + rank) for rank in range(2)]
    run(lanes, first)
    run(twins, first)
    before = [remembered(lane) for lane in lanes]
    outs = [grad.clone() for grad in grads]
    talks = [together([exchange(g, lane)]) for g, lane in zip(outs, lanes, strict=True)]
    with pytest.raises(WireError):
        lead(talks, too_short, bad_round)
    assert torch.equal(outs[0].view(torch.int32), grads[0].view(torch.int32))
    for lane, kept in zip(lanes, before, strict=True):
        assert_same(remembered(lane), kept)
    assert torch.equal(run(lanes, grads)[0][0], run(twins, grads)[0][0])


def test_good_messages_are_not_refused() -> None:
    """The leading by hand is right where nothing is spoilt."""
    grads, lanes = two_ranks("topk:ratio=0.1", "sharded", "residual")
    expected, _ = run(lanes_for("topk:ratio=0.1", "sharded", 2, 100), grads)
    talks = [together([exchange(g, lane)]) for g, lane in zip(grads, lanes, strict=True)]
    with pytest.raises(StopIteration):
        lead(talks, lambda buffer: buffer, 0)
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
def test_measuring_changes_nothing(spec: str) -> None:
    grads = [normal(100, seed=rank) for rank in range(2)]
    way = "mean" if spec == "fp16" else "gather"
    measured, _ = run(lanes_for(spec, way, 2, 100, "none"), grads)
    lanes = lanes_for(spec, way, 2, 100, "none")
    for lane in lanes:
        lane.sample_every = 1 << 40
        lane.ctx = lane.ctx._replace(step=1)
    plain, _ = run(lanes, grads)
    assert torch.equal(measured[0], plain[0])
    assert lanes[0].relative_error is None


def test_gradients_side_by_side_are_averaged_where_they_lie() -> None:
    """A bucket without compression is one call on its own memory."""
    buckets = [torch.arange(10.0) + rank for rank in range(2)]
    lanes = [
        [open_lane(n, parse("none"), parse_memory("none"), "mean", EncodeContext((5,), r, 2, step=1), CPU)
         for n in ("a", "b")]
        for r in range(2)
    ]  # fmt: skip
    talks = [
        together([exchange(bucket[:5], row[0]), exchange(bucket[5:], row[1])])
        for bucket, row in zip(buckets, lanes, strict=True)
    ]
    calls = [next(talk) for talk in talks]
    assert calls[0].buffers[0].data_ptr() == buckets[0].data_ptr()
    assert calls[0].buffers[0].numel() == 10


def test_a_residual_is_not_shared_between_lanes() -> None:
    lanes = lanes_for("topk:ratio=0.1", "gather", 2, 100)
    run(lanes, [normal(100, seed=rank) for rank in range(2)])
    assert isinstance(lanes[0].memory, Residual)
    assert not torch.equal(lanes[0].memory_state["residual"], lanes[1].memory_state["residual"])
