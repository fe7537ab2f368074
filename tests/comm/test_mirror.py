"""Mirrored peers: their messages, and the collectives that are recorded."""

import pytest
import torch

from gradwire.comm.base import Collective, Subgroup
from gradwire.comm.mirror import CollectiveRecord, MirrorComm, UnknownAnswer


def test_peers_send_the_messages_of_this_rank() -> None:
    mirror = MirrorComm(4, rank=1)
    buffer = torch.arange(6, dtype=torch.float32)
    [mean] = mirror.run(Collective("mean", [buffer]))
    assert torch.equal(mean, torch.arange(6.0))
    message = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert [t.tolist() for t in mirror.run(Collective("gather", [message], [3] * 4))] == [
        [1, 2, 3]
    ] * 4
    pieces = [torch.full((n,), n, dtype=torch.uint8) for n in (2, 2, 3, 2)]
    received = mirror.run(Collective("all_to_all", pieces, [2] * 4))
    assert [piece.numel() for piece in received] == [2] * 4
    assert mirror.records == [
        CollectiveRecord("mean", 24, 4, False),
        CollectiveRecord("gather", 3, 4, False),
        CollectiveRecord("all_to_all", 7, 4, False),
    ]


def test_subgroups_have_fewer_ranks() -> None:
    mirror = MirrorComm(8)
    message = torch.zeros(5, dtype=torch.uint8)
    mirror.run(Collective("gather", [message], [5] * 4, subgroup=Subgroup(4, internode=False)))
    mirror.run(Collective("gather", [message], [5] * 2, subgroup=Subgroup(4, internode=True)))
    assert mirror.records == [
        CollectiveRecord("gather", 5, 4, True),
        CollectiveRecord("gather", 5, 2, False),
    ]
    assert (mirror.meter.sent_bytes, mirror.meter.inside_bytes) == (15 + 5, 15)


def test_messages_of_other_lengths_cannot_be_mirrored() -> None:
    mirror = MirrorComm(3)
    with pytest.raises(UnknownAnswer):
        mirror.run(Collective("gather", [torch.zeros(4, dtype=torch.uint8)], [4, 4, 8]))
    assert mirror.records == [CollectiveRecord("gather", 8, 3, False)]
