"""Long gathers and all-to-alls run in pieces; results and byte counts are those of one."""

import pieces_jobs as jobs
import pytest
import torch

from gradwire.comm.process_group import ALL_TO_ALL_PIECES, GATHER_PIECES
from processes import Ranks


@pytest.mark.parametrize("lengths", [[64] * 4, [61, 64, 0, 3], [1, 0, 0, 0], [0] * 4])
def test_what_is_received_does_not_depend_on_pieces(four_ranks: Ranks, lengths: list[int]) -> None:
    is_long = 3 * max(lengths) >= 32
    for received, works, sent in four_ranks.run(jobs.split_job, "gather", lengths):
        expected = [jobs.message(sender, 0, n) for sender, n in enumerate(lengths)]
        assert all(map(torch.equal, received, expected))
        assert works == (GATHER_PIECES if is_long else 1)
        assert sent == 3 * max(lengths)
    results = four_ranks.run(jobs.split_job, "all_to_all", lengths)
    for rank, (received, works, sent) in enumerate(results):
        expected = [jobs.message(sender, rank, lengths[rank]) for sender in range(4)]
        assert all(map(torch.equal, received, expected))
        assert works == (ALL_TO_ALL_PIECES if is_long else 1)
        assert sent == sum(lengths) - lengths[rank]
