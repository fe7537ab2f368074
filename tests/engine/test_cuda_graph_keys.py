"""Keys that lie on a device are those of the step, and are renewed for the next."""

import torch
from torch import Tensor

from gradwire.engine.cuda_graphs import FIRST, Keys, LaneKeys
from gradwire.engine.plan import make_plan
from gradwire.engine.step import Lane
from gradwire.kernels.reference.random import random_bits
from gradwire.types import EncodeContext, Key

CPU = torch.device("cpu")


def lane_at(step: int) -> Lane:
    tensor = torch.zeros(64, 64)
    plan = make_plan("qsgd:bits=4", None, "auto", [tensor], 2)
    lane = plan.lane("w", tensor, rank=1, size=2, seed=7)
    lane.ctx = lane.ctx._replace(step=step)
    return lane


def drawn(key: Key) -> list[int]:
    bits: list[int] = random_bits(key, 5, CPU).tolist()
    return bits


def test_a_key_on_a_device_draws_what_the_number_draws() -> None:
    lane = lane_at(3)
    ctx = lane.ctx._replace(key_store=LaneKeys(Keys(CPU), lane))
    for there, here in (
        (ctx.own_key(), lane.ctx.own_key()),
        (ctx.shared_key(), lane.ctx.shared_key()),
    ):
        assert isinstance(there, Tensor)
        assert isinstance(here, int)
        assert drawn(there) == drawn(here)
    assert drawn(ctx.own_key()) != drawn(ctx.shared_key())


def test_keys_become_those_of_the_next_step_in_their_place() -> None:
    lane, keys = lane_at(3), Keys(CPU)
    ctx = lane.ctx._replace(key_store=LaneKeys(keys, lane))
    shard = ctx._replace(seed=11, rank=0)
    places = [ctx.own_key(), shard.own_key()]
    before = [drawn(place) for place in places]
    lane.ctx = lane.ctx._replace(step=4)
    keys.renew()
    next_turns = [t._replace(step=4, key_store=None) for t in (ctx, shard)]
    assert [drawn(place) for place in places] == [drawn(t.own_key()) for t in next_turns]
    assert before != [drawn(place) for place in places]


def test_there_is_room_for_all_that_a_rehearsal_draws() -> None:
    lane, keys = lane_at(0), Keys(CPU)
    ctx = lane.ctx._replace(key_store=LaneKeys(keys, lane))
    contexts: list[EncodeContext] = [ctx._replace(seed=seed) for seed in range(2 * FIRST + 1)]
    for own in contexts:
        assert drawn(own.own_key()) == drawn(own._replace(key_store=None).own_key())
    keys.end_rehearsal()
    places = [own.own_key() for own in contexts]
    lane.ctx = lane.ctx._replace(step=9)
    keys.renew()
    expected = [drawn(own._replace(step=9, key_store=None).own_key()) for own in contexts]
    assert [drawn(place) for place in places] == expected
