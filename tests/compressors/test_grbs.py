"""GRBS: all ranks draw the same blocks, each entry with the same probability."""

from math import ceil, sqrt

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry

from gradwire.compressors.grbs import GRBS
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext


def chosen(codec: GRBS, ctx: EncodeContext) -> list[int]:
    positions: list[int] = codec.select(EFInput(torch.zeros(ctx.numel)), ctx).tolist()
    return positions


def breaks(positions: list[int], numel: int) -> int:
    """Counts the selected entries that are not followed by another one, cyclically."""
    return sum((p + 1) % numel not in positions for p in positions)


def test_one_block_of_neighbours_is_sent() -> None:
    x = torch.arange(1.0, 7.0)
    seen = set()
    for step in range(60):
        ctx = EncodeContext((6,), step=step)
        out = roundtrip(GRBS(ratio=0.5), x, ctx).tolist()
        places = [i for i, v in enumerate(out) if v]
        assert [out[i] for i in places] == [i + 1.0 for i in places]
        seen.add(tuple(places))
    # A block may go around the end.
    assert seen == {tuple(sorted((s + i) % 6 for i in range(3))) for s in range(6)}


@pytest.mark.parametrize("numel", [1, 2, 7, 1000, 1003])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("block", [1, 5, 64])
def test_blocks_are_few_and_no_longer_than_asked(numel: int, ratio: float, block: int) -> None:
    codec = GRBS(ratio=ratio, block=block)
    count = codec.count(numel)
    assert count == min(numel, max(1, round(ratio * numel)))
    for step in range(6):
        positions = chosen(codec, EncodeContext((numel,), step=step))
        assert positions == sorted(set(positions))
        assert len(positions) == count
        assert 0 <= positions[0] <= positions[-1] < numel
        assert breaks(positions, numel) <= ceil(count / block)


@pytest.mark.parametrize(("numel", "ratio", "block"), [(50, 0.3, 4), (23, 0.13, 16), (30, 0.9, 5)])
def test_every_entry_has_the_same_chance(numel: int, ratio: float, block: int) -> None:
    codec, draws = GRBS(ratio=ratio, block=block), 1500
    hits = torch.zeros(numel)
    for step in range(draws):
        hits[chosen(codec, EncodeContext((numel,), step=step))] += 1
    chance = codec.count(numel) / numel
    assert (hits / draws - chance).abs().max() < 4.5 * sqrt(chance * (1 - chance) / draws)


def test_expected_error_is_what_was_not_drawn() -> None:
    codec, x = GRBS(ratio=0.1, block=8), normal(300, seed=5) ** 3
    errors = torch.tensor(
        [
            squared_error(x, roundtrip(codec, x, EncodeContext((300,), step=step)))
            for step in range(800)
        ]
    )
    assert abs(errors.mean() - 0.9) < 4 * errors.std() / sqrt(800)


def test_only_values_travel() -> None:
    payload = GRBS(ratio=0.01).encode(normal(1_000_000))
    assert [part.numel() for part in payload.parts] == [10_000]
    assert payload.nbytes == 40_000
    assert GRBS(ratio=0.01, values="bf16").encode(normal(1_000_000)).nbytes == 20_000


def test_all_ranks_choose_alike_and_every_step_anew() -> None:
    ctx = EncodeContext((1000,), world_size=4, seed=3, lane_id=5, step=7)
    first, *others = [chosen(GRBS(ratio=0.1), ctx._replace(rank=rank)) for rank in range(4)]
    assert all(other == first for other in others)
    for change in ({"step": 8}, {"lane_id": 6}, {"seed": 4}):
        assert chosen(GRBS(ratio=0.1), ctx._replace(**change)) != first


def test_mean_exchange_equals_gather_exchange() -> None:
    """Quarters are exact, so not even rounding differs."""
    grads = [normal(1000, seed=rank) for rank in range(4)]
    means = Ranks("grbs:ratio=0.1,block=7", "residual", "mean", (1000,), size=4)
    gathers = Ranks("grbs:ratio=0.1,block=7", "residual", "gather", (1000,), size=4)
    for _ in range(3):
        assert torch.equal(means.step(*grads), gathers.step(*grads))
        assert torch.equal(means.residual(), gathers.residual())


def test_everything_is_sent_in_the_end() -> None:
    ranks = Ranks("grbs:ratio=0.1,block=4", "residual", "mean", (103,))
    total = ranks.step(*[torch.ones(103)] * 2)
    for _ in range(200):
        total = total + ranks.step(*[torch.zeros(103)] * 2)
    assert torch.equal(total, torch.ones(103))


def test_ratio_one_sends_every_entry_once() -> None:
    codec, x = GRBS(ratio=1.0, block=3), normal(1000)
    assert chosen(codec, EncodeContext((1000,), step=3)) == list(range(1000))
    assert torch.equal(roundtrip(codec, x, EncodeContext((1000,), step=3)), x)


def test_an_empty_tensor_is_sent_too() -> None:
    assert roundtrip(GRBS(ratio=0.1), torch.zeros(0)).tolist() == []


def test_the_global_generator_is_neither_read_nor_set() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = roundtrip(GRBS(ratio=0.1), normal(1000))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(roundtrip(GRBS(ratio=0.1), normal(1000)), one)


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_entries_are_sent_or_kept(exchange_name: str, bad: float) -> None:
    """An entry that is not drawn waits, whatever it is."""
    ranks = Ranks("grbs:ratio=0.1,block=3", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite() or not ranks.residual(1)[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_bytes_on_the_wire_are_frozen() -> None:
    assert wire_hash(GRBS(ratio=0.1, block=16), eighths(1003)) == "9ee74e59"
    assert wire_hash(GRBS(ratio=0.01, values="fp16"), eighths(4097)) == "2237e3c5"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^grbs: ratio must be in \(0, 1\], got {ratio}$"):
        GRBS(ratio=ratio)


def test_bad_block_and_format() -> None:
    with pytest.raises(ConfigError, match=r"^grbs: block must be at least 1, got 0$"):
        GRBS(ratio=0.1, block=0)
    with pytest.raises(ConfigError, match=r"^grbs: values must be one of"):
        GRBS(ratio=0.1, values="fp8")  # type: ignore[arg-type]
