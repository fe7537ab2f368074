"""Pipelines of three stages: a selection among the entries of another selection."""

import pytest
import torch
from few_ranks import eighths, normal, roundtrip, squared_error, wire_hash

from gradwire.base import OneRound
from gradwire.compressors._nested import NestedSelection
from gradwire.compressors._sparsifier import Pipeline
from gradwire.compressors.topk import TopK
from gradwire.control.base import setting_of, with_setting
from gradwire.errors import ConfigError
from gradwire.spec import format_spec, name_of, parse
from gradwire.types import EFInput, EncodeContext
from gradwire.wire.indices import unpack_index


def pipeline(spec: str) -> Pipeline:
    built = parse(spec)
    assert isinstance(built, Pipeline)
    return built


def test_the_second_selects_among_the_entries_of_the_first_by_hand() -> None:
    """The four largest are 5, -8, 6 and -7, and the two largest of these -8 and -7."""
    x = torch.tensor([1.0, 5.0, -8.0, 2.0, 6.0, -7.0, 3.0, 4.0])
    codec = pipeline("topk:ratio=0.5 | topk:ratio=0.5 | none")
    index, values = codec.encode(x).parts
    assert unpack_index(index, 8, 2).tolist() == [2, 5]
    assert values.tolist() == [-8.0, -7.0]
    assert roundtrip(codec, x).tolist() == [0, 0, -8.0, 0, 0, -7.0, 0, 0]


def test_ranks_draw_different_entries_of_the_largest() -> None:
    x = normal(4096)
    codec = pipeline("topk:ratio=0.25 | randomk:ratio=0.125 | none").sparsifier
    largest = set(TopK(0.25).select(EFInput(x), EncodeContext((4096,))).tolist())
    contexts = [EncodeContext((4096,), rank=rank, world_size=2) for rank in range(2)]
    first, second = (set(codec.select(EFInput(x), ctx).tolist()) for ctx in contexts)
    assert len(first) == len(second) == 128
    assert first < largest
    assert second < largest
    # Independent draws of 128 of 1024 share 16 on average.
    assert len(first & second) < 64


def test_a_random_choice_among_the_largest_is_a_contraction_in_the_mean() -> None:
    """A quarter of the largest fifth's squared norm is sent, on average."""
    x = normal(1000)
    codec = pipeline("topk:ratio=0.2 | randomk:ratio=0.25 | none")
    largest = squared_error(x, roundtrip(pipeline("topk:ratio=0.2 | none"), x))
    steps = [EncodeContext((1000,), step=step) for step in range(400)]
    errors = torch.tensor([squared_error(x, roundtrip(codec, x, ctx)) for ctx in steps])
    expected = 1 - 0.25 * (1 - largest)
    assert abs(errors.mean() - expected) < 4 * errors.std() / 400**0.5
    assert codec.traits().contraction


def test_error_feedback_keeps_all_that_was_not_sent() -> None:
    x, residual = normal(1000), normal(1000) / 2
    total, out = x + residual, torch.empty(1000)
    codec = pipeline("topk:ratio=0.2 | randomk:ratio=0.25 | efsign")
    ctx = EncodeContext((1000,))
    parts = codec.encode_fused(EFInput(x, residual, out), ctx)
    sent = torch.zeros(1000)
    codec.decode_add(sent, [parts], 1.0, ctx)
    assert sent.count_nonzero() == 50
    torch.testing.assert_close(sent + out, total)


def test_names_specs_and_settings_have_all_stages() -> None:
    spec = "randomk:ratio=0.1 | topk:ratio=0.05 | qsgd:bits=2"
    codec = pipeline(spec)
    assert isinstance(codec.sparsifier, NestedSelection)
    assert format_spec(codec) == spec
    assert name_of(codec) == "randomk|topk|qsgd"
    assert setting_of(codec, "ratio") == 0.1
    assert format_spec(with_setting(codec, "ratio", 0.2)) == spec.replace("0.1", "0.2")
    assert format_spec(with_setting(codec, "bits", 3)) == spec.replace("=2", "=3")
    with pytest.raises(ConfigError, match="has no setting 'rank'"):
        setting_of(codec, "rank")


def test_a_first_stage_may_select_nothing() -> None:
    """A threshold may let nothing pass, so that the second stage has nothing to select from."""
    codec = pipeline("threshold:value=100 | topk:ratio=0.5 | fp16")
    x = normal(100)
    assert codec.traits().variable_length
    assert roundtrip(codec, x).count_nonzero() == 0
    x[7] = 200.0
    assert roundtrip(codec, x).nonzero().tolist() == [[7]]


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    codec = parse("topk:ratio=0.5 | randomk:ratio=0.25 | qsgd:bits=4")
    assert isinstance(codec, OneRound)
    assert wire_hash(codec, eighths(1000)) == "e2f4ee82"
