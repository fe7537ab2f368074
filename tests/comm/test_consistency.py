"""Differences between settings: their paths and values, as small as they are."""

import json

import pytest
import torch
from torch import Tensor

from gradwire.comm.consistency import compare_settings, differences
from gradwire.errors import ConfigError, WireError


def sent(*views: object) -> list[Tensor]:
    texts = [v if isinstance(v, bytes) else json.dumps(v, sort_keys=True).encode() for v in views]
    return [torch.tensor(list(text), dtype=torch.uint8) for text in texts]


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, [("a", ["1", "2"])]),
        ({"a": 1}, {"a": 1.0}, [("a", ["1", "1.0"])]),
        ({"a": True}, {"a": 1}, [("a", ["true", "1"])]),
        ({"a": 1}, {}, [("a", ["1", "not set"])]),
        ({"a": None}, {}, [("a", ["null", "not set"])]),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, [("a.b[1].c", ["2", "3"])]),
        ({"a": [1]}, {"a": [1, 2]}, [("a[1]", ["not set", "2"])]),
        ({"a": [1]}, {"a": 1}, [("a", ["[1]", "1"])]),
        # Fields of different classes are not compared.
        (
            {"a": {"class": "X", "x": 1}},
            {"a": {"class": "Y", "y": 1}},
            [("a.class", ['"X"', '"Y"'])],
        ),
        ({"a": {"class": "X", "x": 1}}, {"a": {"class": "X", "x": 2}}, [("a.x", ["1", "2"])]),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, [("b", ["1", "2"]), ("a", ["1", "2"])]),
        ({"x": float("nan")}, {"x": float("nan")}, []),
    ],
)
def test_differences(one: object, two: object, found: list[object]) -> None:
    assert list(differences([one, two])) == found


def test_all_ranks_of_a_value_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        compare_settings(sent({"a": {"x": 1}}, {"a": {"x": 2}}, {"a": {"x": 1}}))
    expected = "ranks are set up differently:\n  a.x: 1 on rank [0, 2]; 2 on rank [1]"
    assert str(caught.value) == expected


def test_equal_settings_in_other_words_are_equal() -> None:
    compare_settings(sent({"a": 1}, b'{ "a" : 1 }'))


def test_settings_nested_too_deeply_are_refused() -> None:
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    deeper = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    for text in (deep, deeper):
        with pytest.raises((WireError, ConfigError)):
            compare_settings(sent({"a": 1}, text))
