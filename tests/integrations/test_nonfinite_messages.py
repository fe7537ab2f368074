"""A message that is not finite, though it was when it was sent, among real ranks."""

import received_nonfinite_jobs as jobs
import torch

from processes import Ranks


def test_a_corrupted_shard_is_skipped_on_all_ranks(four_ranks: Ranks) -> None:
    """The rank that averages a shard sends its flag with the mean; its residual stays finite."""
    results = four_ranks.run(jobs.corrupted_job, "all_to_all", 3)
    for text, skipped, finite, weights in results:
        assert (text, skipped, finite) == ("nothing was raised", 1, True)
        assert weights.isfinite().all()
        assert torch.equal(weights, results[0][3])


def test_a_corrupted_message_of_the_last_round_is_a_wire_error(four_ranks: Ranks) -> None:
    """Other ranks have received it intact, and no later message can inform them."""
    results = four_ranks.run(jobs.corrupted_job, "gather", 0)
    text, _, finite, _ = results[jobs.CORRUPTED]
    assert text.startswith("WireError: a message of step 2 that rank 1 received is not finite")
    assert finite
