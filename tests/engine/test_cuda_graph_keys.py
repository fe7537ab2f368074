"""RNG keys in device memory equal those of the step, and are renewed for the next step."""

import torch
from torch import Tensor

from gradwire.engine.cuda_graphs import INITIAL_KEYS, KeyBuffer, LaneKeys
from gradwire.engine.make_plan import make_plan
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


def random_words(key: Key) -> list[int]:
    bits: list[int] = random_bits(key, 5, CPU).tolist()
    return bits


def test_a_key_on_a_device_draws_the_numbers_of_an_integer_key() -> None:
    lane = lane_at(3)
    ctx = lane.ctx._replace(key_store=LaneKeys(KeyBuffer(CPU), lane))
    for device_key, key in (
        (ctx.own_key(), lane.ctx.own_key()),
        (ctx.shared_key(), lane.ctx.shared_key()),
    ):
        assert isinstance(device_key, Tensor)
        assert isinstance(key, int)
        assert random_words(device_key) == random_words(key)
    assert random_words(ctx.own_key()) != random_words(ctx.shared_key())


def test_keys_are_renewed_in_place_for_the_next_step() -> None:
    lane, keys = lane_at(3), KeyBuffer(CPU)
    ctx = lane.ctx._replace(key_store=LaneKeys(keys, lane))
    shard = ctx._replace(seed=11, rank=0)
    slots = [ctx.own_key(), shard.own_key()]
    before = [random_words(slot) for slot in slots]
    lane.ctx = lane.ctx._replace(step=4)
    keys.renew()
    next_contexts = [t._replace(step=4, key_store=None) for t in (ctx, shard)]
    assert [random_words(slot) for slot in slots] == [
        random_words(t.own_key()) for t in next_contexts
    ]
    assert before != [random_words(slot) for slot in slots]


def test_the_buffer_grows_to_the_keys_of_the_warm_up() -> None:
    lane, keys = lane_at(0), KeyBuffer(CPU)
    ctx = lane.ctx._replace(key_store=LaneKeys(keys, lane))
    contexts: list[EncodeContext] = [
        ctx._replace(seed=seed) for seed in range(2 * INITIAL_KEYS + 1)
    ]
    for own in contexts:
        assert random_words(own.own_key()) == random_words(own._replace(key_store=None).own_key())
    keys.end_warm_up()
    slots = [own.own_key() for own in contexts]
    lane.ctx = lane.ctx._replace(step=9)
    keys.renew()
    expected = [random_words(own._replace(step=9, key_store=None).own_key()) for own in contexts]
    assert [random_words(slot) for slot in slots] == expected
