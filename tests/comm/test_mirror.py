"""Peers that are not there: what they answer, and what is counted."""

import pytest
import torch

from gradwire.comm.base import Collective, Subgroup
from gradwire.comm.mirror import Ghost, Said, Unheard


def test_peers_answer_what_they_are_told() -> None:
    ghost = Ghost(4, rank=1)
    buffer = torch.arange(6, dtype=torch.float32)
    [mean] = ghost.answer(Collective("mean", [buffer]))
    assert torch.equal(mean, torch.arange(6.0))
    told = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert [t.tolist() for t in ghost.answer(Collective("gather", [told], [3] * 4))] == [
        [1, 2, 3]
    ] * 4
    pieces = [torch.full((n,), n, dtype=torch.uint8) for n in (2, 2, 3, 2)]
    heard = ghost.answer(Collective("scatter", pieces, [2] * 4))
    assert [piece.numel() for piece in heard] == [2] * 4
    assert ghost.said == [
        Said("mean", 24, 4, False),
        Said("gather", 3, 4, False),
        Said("scatter", 7, 4, False),
    ]


def test_rings_have_fewer_members() -> None:
    ghost = Ghost(8)
    message = torch.zeros(5, dtype=torch.uint8)
    ghost.answer(Collective("gather", [message], [5] * 4, ring=Subgroup(4, across=False)))
    ghost.answer(Collective("gather", [message], [5] * 2, ring=Subgroup(4, across=True)))
    assert ghost.said == [Said("gather", 5, 4, True), Said("gather", 5, 2, False)]
    assert (ghost.meter.sent_bytes, ghost.meter.inside_bytes) == (15 + 5, 15)


def test_lengths_that_differ_cannot_be_made_up() -> None:
    ghost = Ghost(3)
    with pytest.raises(Unheard):
        ghost.answer(Collective("gather", [torch.zeros(4, dtype=torch.uint8)], [4, 4, 8]))
    assert ghost.said == [Said("gather", 8, 3, False)]
