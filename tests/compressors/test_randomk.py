"""Random-k: a selection that is equal on all ranks and drawn anew at every step."""

from math import sqrt

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.randomk import RandomK
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext


def chosen(codec: RandomK, ctx: EncodeContext) -> list[int]:
    positions: list[int] = codec.select(EFInput(torch.zeros(ctx.numel)), ctx).tolist()
    return positions


def test_one_entry_of_each_stratum_is_sent() -> None:
    """Strata of two entries, which begin at a random offset."""
    x, seen = torch.arange(1.0, 7.0), set()
    for step in range(200):
        codec, ctx = RandomK(ratio=0.5), EncodeContext((6,), step=step)
        places = chosen(codec, ctx)
        offsets = [(0, 1), (2, 3), (4, 5)], [(5, 0), (1, 2), (3, 4)]
        assert any(all(len({*pair} & {*places}) == 1 for pair in pairs) for pairs in offsets)
        expected = [v if i in places else 0.0 for i, v in enumerate(x.tolist())]
        assert roundtrip(codec, x, ctx).tolist() == expected
        seen.add(tuple(places))
    # Two choices in each of three strata at two offsets; 0, 2, 4 and 1, 3, 5 are possible at both.
    assert len(seen) == 14


RATIOS = {0.9: (50, 7), 0.5: (9, 51), 0.3: (10, 101), 1 / 3: (50, 10), 0.01: (250, 130)}


@pytest.mark.parametrize(
    ("numel", "ratio"),
    [
        *((numel, ratio) for ratio, sizes in RATIOS.items() for numel in sizes),
        *((numel, 1 / numel) for numel in (1, 2, 7)),
        (13, 1.0),
    ],
)
def test_every_entry_has_the_same_chance(backend: str, numel: int, ratio: float) -> None:
    """Selections of an entry in independent steps are binomial; 6 deviations: one test in 1e7."""
    codec, draws = RandomK(ratio=ratio), 2000
    hits = torch.zeros(numel)
    for step in range(draws):
        positions = chosen(codec, EncodeContext((numel,), step=step))
        assert positions == sorted(set(positions))
        assert len(positions) == codec.count(numel)
        hits[positions] += 1
    chance = codec.count(numel) / numel
    assert hits.sum() == draws * codec.count(numel)
    assert (hits / draws - chance).abs().max() <= 6 * sqrt(chance * (1 - chance) / draws)


def test_only_values_travel() -> None:
    payload = RandomK(ratio=0.1).encode(normal(1000))
    assert [part.numel() for part in payload.parts] == [100]
    assert payload.nbytes == 400
    assert RandomK(ratio=0.1, values="bf16").encode(normal(1000)).nbytes == 200


def test_all_ranks_choose_alike() -> None:
    ctx = EncodeContext((1000,), world_size=4, seed=3, lane_id=5, step=7)
    first, *others = [chosen(RandomK(ratio=0.1), ctx._replace(rank=rank)) for rank in range(4)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("change", [{"step": 8}, {"lane_id": 6}, {"seed": 4}])
def test_another_step_lane_or_seed_is_another_choice(change: dict[str, int]) -> None:
    ctx = EncodeContext((1000,), seed=3, lane_id=5, step=7)
    one, two = (set(chosen(RandomK(ratio=0.1), t)) for t in (ctx, ctx._replace(**change)))
    # By chance a tenth of the hundred are in both.
    assert len(one & two) < 30


@pytest.mark.parametrize(("numel", "ratio"), [(300, 0.1), (10, 0.3), (1000, 0.007)])
def test_expected_error_is_that_of_a_uniform_choice(numel: int, ratio: float) -> None:
    codec, x = RandomK(ratio=ratio), normal(numel, seed=5)
    errors = torch.tensor(
        [
            squared_error(x, roundtrip(codec, x, EncodeContext((numel,), step=step)))
            for step in range(2000)
        ]
    )
    expected = 1 - codec.count(numel) / numel
    assert abs(errors.mean() - expected) < 4 * errors.std() / sqrt(2000)


def test_mean_exchange_equals_gather_exchange() -> None:
    """Quarters are exact, so not even rounding differs."""
    grads = [normal(1000, seed=rank) for rank in range(4)]
    means = Ranks("randomk:ratio=0.1", "residual", "mean", (1000,), size=4)
    gathers = Ranks("randomk:ratio=0.1", "residual", "gather", (1000,), size=4)
    for _ in range(3):
        assert torch.equal(means.step(*grads), gathers.step(*grads))
        assert torch.equal(means.residual(), gathers.residual())


def test_everything_is_sent_in_the_end() -> None:
    ranks = Ranks("randomk:ratio=0.1", "residual", "mean", (100,))
    total = ranks.step(*[torch.ones(100)] * 2)
    for _ in range(200):
        total = total + ranks.step(*[torch.zeros(100)] * 2)
    assert torch.equal(total, torch.ones(100))


def test_ratio_one_sends_every_entry_once(backend: str) -> None:
    codec, x = RandomK(ratio=1.0), normal(10_000)
    assert chosen(codec, EncodeContext((10_000,), step=3)) == list(range(10_000))
    assert torch.equal(roundtrip(codec, x, EncodeContext((10_000,), step=3)), x)


@pytest.mark.parametrize("numel", [1, 7, 1000, 1003])
def test_no_entry_is_chosen_twice_or_outside(backend: str, numel: int) -> None:
    for step in range(50):
        positions = chosen(RandomK(ratio=0.3), EncodeContext((numel,), step=step))
        assert len(set(positions)) == len(positions) == RandomK(ratio=0.3).count(numel)
        assert positions == sorted(positions)
        assert 0 <= positions[0] <= positions[-1] < numel


def test_an_empty_tensor_is_sent_too(backend: str) -> None:
    assert roundtrip(RandomK(ratio=0.1), torch.zeros(0)).tolist() == []


def test_the_global_generator_is_neither_read_nor_set() -> None:
    x, codec = normal(1000), RandomK(ratio=0.1)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = roundtrip(codec, x)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(roundtrip(codec, x), one)


def test_parameters_with_anagrams_for_names_choose_differently() -> None:
    plan = make_plan("randomk:ratio=0.1", None, "auto", [], 1)
    tensor = torch.zeros(100, 100)
    contexts = [plan.lane(name, tensor, 0, 1, seed=0).ctx for name in ("layer12", "layer21")]
    one, two = (set(chosen(RandomK(ratio=0.1), ctx)) for ctx in contexts)
    assert len(one & two) < 200


def test_the_choice_does_not_depend_on_what_was_sent_before() -> None:
    ctx = EncodeContext((1000,), step=5)
    fresh = chosen(RandomK(ratio=0.1), ctx)
    codec = RandomK(ratio=0.1)
    for step in range(3):
        roundtrip(codec, normal(50), EncodeContext((50,), lane_id=9, step=step))
    assert chosen(codec, ctx) == fresh


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_entries_are_sent_or_kept(backend: str, exchange_name: str, bad: float) -> None:
    """An entry that is not drawn waits, whatever it is."""
    ranks = Ranks("randomk:ratio=0.1", "residual", exchange_name, (100,), size=3)
    grads: list[Tensor] = [normal(100), with_entry(normal(100), 7, bad), normal(100)]
    out = ranks.step(*grads)
    assert not out[7].isfinite() or not ranks.residual(1)[7].isfinite()
    rest = torch.arange(100) != 7
    assert out[rest].isfinite().all()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(RandomK(ratio=0.1), eighths(1003)) == "55ca6089"
    assert wire_hash(RandomK(ratio=0.01, values="fp16"), eighths(4097)) == "53e65832"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^randomk: ratio must be in \(0, 1\], got {ratio}$"):
        RandomK(ratio=ratio)


def test_unknown_format_of_values() -> None:
    message = r"^randomk: values must be one of \['fp32', 'bf16', 'fp16'\], got 'int8'$"
    with pytest.raises(ConfigError, match=message):
        RandomK(ratio=0.1, values="int8")  # type: ignore[arg-type]
