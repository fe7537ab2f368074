"""torch.compile before and after wrapping and attaching, under DDP and FSDP2, on two processes."""

import compiled_jobs as jobs
import pytest

from processes import Ranks

DDP_ORDERS = (
    "module, DDP, attach",
    "in place, DDP, attach",
    "DDP, attach, compile",
    "DDP, compile, attach",
    "DDP, attach, in place",
)
FSDP_ORDERS = (
    "blocks, shard, attach",
    "wrapped blocks, shard, attach",
    "shard, compile, attach",
    "shard, attach, compile",
)


def test_ddp_in_any_order_is_as_without_compiling(two_ranks: Ranks) -> None:
    for runs in two_ranks.run(jobs.all_ddp, DDP_ORDERS):
        expected, _, none = runs.pop("not compiled")
        assert none == 0
        for order, (losses, steps, graphs) in runs.items():
            assert losses == pytest.approx(expected, rel=1e-5), order
            assert steps == 4
            assert graphs > 0, order


def test_a_compiled_ddp_that_bypasses_hooks_is_refused(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.bypassed):
        assert "compiled autograd's python_reducer hands over single gradients" in text
        assert "set torch._dynamo.config.optimize_ddp = True" in text


def test_fsdp_in_any_order_is_as_without_compiling(two_ranks: Ranks) -> None:
    for runs, without_us in two_ranks.run(jobs.all_sharded, FSDP_ORDERS):
        expected, _, none = runs.pop("not compiled")
        assert none == 0
        for order, (losses, steps, graphs) in runs.items():
            assert losses == pytest.approx(expected, rel=1e-5), order
            assert steps == 3
            # Our hooks break no graph that FSDP2's own do not.
            assert graphs == without_us[order][2] > 0, order
