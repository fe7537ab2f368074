"""Pipelines: one method chooses entries, another writes their values."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, said, squared_error, wire_hash, with_entry

from laconic.compressors.qsgd import QSGD
from laconic.compressors.topk import TopK
from laconic.contract import OneRound
from laconic.plan import wants_residual
from laconic.sparse import Pipeline
from laconic.spec import parse
from laconic.types import Given, Turn
from laconic.wire.indices import unpack_index

ALL = [
    f"{first} | {second}"
    for first in ("topk:ratio=0.1", "randomk:ratio=0.1")
    for second in ("none", "fp16", "bf16", "efsign", "qsgd", "qsgd:bits=2")
]


def pipeline(spec: str) -> Pipeline:
    built = parse(spec)
    assert isinstance(built, Pipeline)
    return built


def test_chosen_values_are_quantised_by_hand() -> None:
    """The two largest are -4 and 3: their signs, and 3.5 for both."""
    x = torch.tensor([1.0, -4.0, 2.0, 3.0])
    index, bits, scale = pipeline("topk:ratio=0.5 | efsign").encode(x).parts
    assert unpack_index(index, 4, 2).tolist() == [1, 3]
    assert bits.tolist() == [0b01]
    assert scale.tolist() == [3.5]
    assert said(pipeline("topk:ratio=0.5 | efsign"), x).tolist() == [0.0, -3.5, 0.0, 3.5]


def test_random_positions_do_not_travel_in_a_pipeline_either() -> None:
    parts = pipeline("randomk:ratio=0.1 | efsign").encode(normal(1000)).parts
    assert [part.numel() for part in parts] == [13, 1]


@pytest.mark.parametrize("second", ["fp16", "bf16"])
def test_a_format_as_quantiser_is_the_format_of_values(second: str) -> None:
    x = normal(1000)
    plain = parse(f"topk:ratio=0.1,values={second}")
    assert isinstance(plain, OneRound)
    assert wire_hash(pipeline(f"topk:ratio=0.1 | {second}"), x) == wire_hash(plain, x)


@pytest.mark.parametrize("spec", ALL)
def test_only_chosen_entries_are_said(backend: str, spec: str) -> None:
    x = normal(1000)
    codec = pipeline(spec)
    out = said(codec, x)
    chosen = codec.sparsifier.select(Given(x), Turn((1000,)))
    rest = torch.ones(1000, dtype=torch.bool)
    rest[chosen] = False
    assert torch.equal(out[rest], torch.zeros(900))
    assert out[chosen].count_nonzero() > 0


def test_entries_are_unbiased_where_the_quantiser_is() -> None:
    x = normal(500)
    codec = pipeline("topk:ratio=0.1 | qsgd:bits=2")
    kept = said(pipeline("topk:ratio=0.1 | none"), x)
    heard = torch.stack([said(codec, x, Turn((500,), step=s)) for s in range(500)])
    total = (heard @ kept).double()
    assert abs(total.mean() - kept.double() @ kept.double()) < 4 * total.std() / 500**0.5


def test_errors_add_up() -> None:
    """What the first loses and what the second rounds are at different places."""
    x = normal(1000)
    codec = pipeline("topk:ratio=0.1 | qsgd:bits=4")
    kept = said(pipeline("topk:ratio=0.1 | none"), x)
    out = said(codec, x)
    lost = squared_error(x, kept)
    rounded = float((kept - out).square().sum() / x.square().sum())
    assert squared_error(x, out) == pytest.approx(lost + rounded, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "summable", "contraction", "unbiased"),
    [
        ("topk:ratio=0.1 | qsgd:bits=4", False, True, False),
        ("topk:ratio=0.1 | qsgd:bits=2", False, False, False),
        ("randomk:ratio=0.1 | bf16", True, True, False),
        ("randomk:ratio=0.1 | efsign", False, True, False),
    ],
)
def test_traits_are_those_of_both(
    spec: str, summable: bool, contraction: bool, unbiased: bool
) -> None:
    traits = pipeline(spec).traits()
    assert (traits.summable, traits.contraction, traits.unbiased) == (
        summable,
        contraction,
        unbiased,
    )
    assert wants_residual(pipeline(spec)) == contraction


def test_summable_pipelines_may_be_added_up_on_the_way() -> None:
    grads = [eighths(1000).roll(rank) for rank in range(4)]
    mean = Ranks("randomk:ratio=0.1 | bf16", "none", "mean", (1000,), size=4).step(*grads)
    gather = Ranks("randomk:ratio=0.1 | bf16", "none", "gather", (1000,), size=4).step(*grads)
    torch.testing.assert_close(mean, gather, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("way", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spec", [spec for spec in ALL if spec.startswith("topk")])
def test_bad_numbers_show(backend: str, spec: str, way: str, bad: float) -> None:
    ranks = Ranks(spec, "none", way, (200,), size=2)
    out = ranks.step(with_entry(normal(200), 7, bad), normal(200))
    assert not out[7].isfinite()


def test_bits_on_the_wire() -> None:
    codec = pipeline("topk:ratio=0.01 | qsgd:bits=4")
    payload = codec.encode(normal(1_000_000))
    # 8.57 bits of position, 4 of value and a quarter for the scale.
    assert 8 * payload.nbytes / 10_000 == pytest.approx(12.83, abs=0.02)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Pipeline(TopK(ratio=0.5), QSGD(bits=4)), eighths(1000)) == "68a155b9"
    assert wire_hash(pipeline("randomk:ratio=0.5 | efsign"), eighths(1024)) == "f6637992"
