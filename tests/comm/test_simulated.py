"""Simulated ranks: results in rank order, bytes by formula, and mismatches that are refused."""

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.errors import PeerError


def run_all(*calls: Collective) -> CollectiveProgram[list[list[Tensor]]]:
    """Runs the collectives one after the other, and returns all results."""
    answers = []
    for call in calls:
        answers.append((yield call))
    return answers


def message(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def one_call(calls: list[Collective]) -> tuple[list[list[Tensor]], list[Meter]]:
    """Returns each rank's result of its collective, and its meter."""
    network = Simulated(len(calls))
    answers = network.run([run_all(call) for call in calls])
    return [answer[0] for answer in answers], network.meters


def test_mean() -> None:
    answers, meters = one_call(
        [Collective("mean", [torch.tensor([float(r), 4.0])]) for r in range(3)]
    )
    for [mean] in answers:
        torch.testing.assert_close(mean, torch.tensor([1.0, 4.0]))
        assert torch.equal(mean, answers[0][0])
    for meter in meters:
        assert meter.sent_bytes == meter.received_bytes == 2 * 2 * 8 // 3
        assert (meter.calls, meter.message_bytes) == (1, 8)


def test_mean_divides_before_it_adds() -> None:
    calls = [Collective("mean", [torch.full((2,), 60000.0, dtype=torch.float16)]) for _ in range(4)]
    answers, _ = one_call(calls)
    assert answers[0][0].tolist() == [60000.0, 60000.0]


def test_gather_of_known_sizes() -> None:
    answers, meters = one_call([Collective("gather", [message(r, r)], [2, 2, 2]) for r in range(3)])
    for answer in answers:
        assert [buffer.tolist() for buffer in answer] == [[0, 0], [1, 1], [2, 2]]
    for meter in meters:
        assert (meter.sent_bytes, meter.received_bytes) == (2 * 2, 2 * 2)
        assert (meter.calls, meter.message_bytes) == (1, 2)


def test_gather_of_unknown_sizes_exchanges_them_first() -> None:
    """Sends eight bytes of size, then messages padded to the longest."""
    calls = [Collective("gather", [message(*range(length))]) for length in (0, 3, 1)]
    answers, meters = one_call(calls)
    for answer in answers:
        assert [buffer.tolist() for buffer in answer] == [[], [0, 1, 2], [0]]
    for meter in meters:
        assert meter.sent_bytes == meter.received_bytes == 2 * 8 + 2 * 3
        assert meter.calls == 2


def test_gather_of_different_known_sizes_is_padded() -> None:
    _, meters = one_call([Collective("gather", [message(*range(n))], [1, 3]) for n in (1, 3)])
    assert [meter.sent_bytes for meter in meters] == [3, 3]


def test_scatter_of_known_sizes() -> None:
    calls = [
        Collective(
            "all_to_all", [message(*[10 * rank + to] * (to + 1)) for to in range(3)], [rank + 1] * 3
        )
        for rank in range(3)
    ]
    answers, meters = one_call(calls)
    assert [[b.tolist() for b in answer] for answer in answers] == [
        [[0], [10], [20]],
        [[1, 1], [11, 11], [21, 21]],
        [[2, 2, 2], [12, 12, 12], [22, 22, 22]],
    ]
    assert [meter.sent_bytes for meter in meters] == [2 + 3, 1 + 3, 1 + 2]
    assert [meter.received_bytes for meter in meters] == [2 * 1, 2 * 2, 2 * 3]


def test_scatter_of_unknown_sizes_exchanges_them_first() -> None:
    """Sends eight bytes to every other rank and receives as many, as a gather does."""
    calls = [Collective("all_to_all", [message(1), message(1, 2), message()]) for _ in range(3)]
    _, meters = one_call(calls)
    assert [meter.sent_bytes for meter in meters] == [2 * 8 + n for n in (2, 1, 3)]
    assert [meter.received_bytes for meter in meters] == [2 * 8 + n for n in (2, 4, 0)]


def test_broadcast() -> None:
    answers, meters = one_call([Collective("broadcast", [message(r, r)], root=1) for r in range(3)])
    assert [answer[0].tolist() for answer in answers] == [[1, 1]] * 3
    assert [meter.sent_bytes for meter in meters] == [0, 2, 0]
    assert [meter.received_bytes for meter in meters] == [2, 0, 2]


@pytest.mark.parametrize("kind", ["mean", "gather", "all_to_all"])
def test_one_rank_sends_nothing(kind: str) -> None:
    _, [meter] = one_call([Collective(kind, [torch.ones(4)])])  # type: ignore[arg-type]
    assert (meter.sent_bytes, meter.received_bytes) == (0, 0)


def test_a_program_without_collectives() -> None:
    assert Simulated(2).run([run_all(), run_all()]) == [[], []]


def test_different_collectives_are_out_of_step() -> None:
    with pytest.raises(PeerError, match="simulated ranks are out of step"):
        one_call([Collective("mean", [torch.ones(4)]), Collective("gather", [message(1)])])


@pytest.mark.parametrize("finished", [0, 1])
def test_a_rank_that_has_finished_is_out_of_step(finished: int) -> None:
    calls = [[Collective("mean", [torch.ones(4)])] * 2 for _ in range(2)]
    calls[finished].pop()
    with pytest.raises(PeerError, match="simulated ranks are out of step"):
        Simulated(2).run([run_all(*row) for row in calls])


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(
            [Collective("mean", [torch.ones(n)]) for n in (3, 2)], id="means of two lengths"
        ),
        pytest.param(
            [Collective("mean", [torch.ones(n)]) for n in (1, 3)], id="mean of one and three"
        ),
        pytest.param(
            [Collective("mean", [torch.ones(2, dtype=t)]) for t in (torch.float16, torch.float32)],
            id="means of two types",
        ),
        pytest.param(
            [Collective("broadcast", [message(1)], root=r) for r in (0, 1)], id="two roots"
        ),
        pytest.param(
            [
                Collective("gather", [message(1)], [1, 1]),
                Collective("gather", [message(1, 2)], [2, 2]),
            ],
            id="other sizes than agreed",
        ),
    ],
)
def test_collectives_that_do_not_match_are_out_of_step(calls: list[Collective]) -> None:
    with pytest.raises(PeerError):
        one_call(calls)
