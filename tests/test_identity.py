"""Identities: what makes two methods different, for ranks and for states."""

import enum
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.compressors._sparsifier import Pipeline
from gradwire.compressors.qsgd import QSGD
from gradwire.compressors.topk import TopK
from gradwire.errors import ConfigError
from gradwire.identity import check_saved_identity, code_digests, identity_of
from gradwire.spec import compressor_classes, exchange_classes, format_spec, memory_classes, name_of


def half(x: float) -> float:
    return x / 2


class Kind(enum.IntEnum):
    ONE = 1
    TWO = 2


@dataclass(frozen=True)
class Inner:
    value: object = 1


@dataclass(frozen=True, eq=False)
class Mine(TopK):
    """A method of a user's own, with a parameter of any kind."""

    ratio: float = 0.1
    extra: object = None
    cache: Any = field(default=None, compare=False)


KINDS: dict[str, tuple[object, object]] = {
    "float": (0.1, 0.10000001),
    "small difference": (0.1, math.nextafter(0.1, 1)),
    "float and int": (1.0, 1),
    "bool and int": (True, 1),
    "none": (None, 0),
    "string and number": ("1", 1),
    "string": ("a", 'a",values="b'),
    "tuple": ((1, 2), (2, 1)),
    "nested": ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}),
    "keys": ({1: "a", 2: "b"}, {1: "a", 3: "b"}),
    "set": (frozenset({"a", "b"}), frozenset({"a", "c"})),
    "not a number": (math.nan, math.inf),
    "enum": (Kind.ONE, Kind.TWO),
    "enum and number": (Kind.ONE, 1),
    "dtype": (torch.float32, torch.float16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "path": (Path("a"), Path("b")),
    "tensor": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
    "tensor type": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "tensor shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "array": (np.zeros(3), np.ones(3)),
    "scalar": (np.float32(0.1), np.float64(0.1)),
    "function": (half, math.sqrt),
    "builtin": (torch.sign, torch.abs),
    "partial": (partial(half, 1.0), partial(half, 2.0)),
    "class": (Inner, Kind),
    "dataclass": (Inner(1), Inner(2)),
    "other dataclass": (Inner(1), QSGD()),
    "nested function": (Inner(half), Inner(math.sqrt)),
    "pipeline": (Pipeline(TopK(0.1), QSGD()), Pipeline(TopK(0.1), QSGD(bits=8))),
}
"""Pairs of values of a field that make two methods different."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_difference_in_a_field_shows(kind: str) -> None:
    first, second = (identity_of(Mine(extra=value)) for value in KINDS[kind])
    assert json.dumps(first) != json.dumps(second)
    assert format_spec(Mine(extra=KINDS[kind][0])) != format_spec(Mine(extra=KINDS[kind][1]))
    with pytest.raises(ConfigError, match=r"^state: compressor\.extra"):
        check_saved_identity("compressor", json.dumps(first), second)
    # Made anew, it is the same.
    check_saved_identity("compressor", json.dumps(first), identity_of(Mine(extra=KINDS[kind][0])))


def test_a_class_outside_the_package_is_named_in_full() -> None:
    assert identity_of(Mine()) == {
        "class": "test_identity.Mine",
        "ratio": 0.1,
        "values": "bf16",
        "extra": None,
    }
    assert format_spec(Mine()) == 'test_identity.Mine:ratio=0.1,values="bf16",extra=null'
    assert name_of(Mine()) == "test_identity.Mine"

    @dataclass(frozen=True)
    class Local(TopK):
        pass

    where = "test_a_class_outside_the_package_is_named_in_full.<locals>.Local"
    assert identity_of(Local(0.1))["class"] == f"test_identity.{where}"


@pytest.mark.parametrize("value", [lambda x: x, object(), Inner().__eq__, 1j, Inner(object())])
def test_what_cannot_be_compared_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^test_identity\.(Mine: extra|Inner: value) is "):
        identity_of(Mine(extra=value))


def test_a_tensor_without_contents_is_refused() -> None:
    with pytest.raises(ConfigError, match="Mine: extra is a tensor without contents"):
        identity_of(Mine(extra=torch.empty(3, device="meta")))


def test_a_field_that_is_not_compared_is_no_parameter() -> None:
    assert identity_of(Mine(cache=object())) == identity_of(Mine())


def test_a_class_that_is_no_dataclass_is_refused() -> None:
    class Plain:
        pass

    for item in (Plain(), Mine):
        with pytest.raises(ConfigError, match="must be a dataclass"):
            identity_of(item)


def test_classes_of_the_catalogue_have_different_identities() -> None:
    for catalogue in (compressor_classes(), memory_classes(), exchange_classes()):
        assert len({cls.__qualname__ for cls in catalogue.values()}) == len(catalogue)
    for cls in [*compressor_classes().values(), *memory_classes().values()]:
        item = cls(**cls.examples[0])
        assert code_digests(item) == {}
        assert "." not in str(identity_of(item)["class"])


SOURCE = """
from dataclasses import dataclass
from functools import cached_property
from gradwire.base import memoized
from gradwire.compressors.topk import TopK

def helper(x):
    return {helper}

def factory(scale):
    class Base(TopK):
        def scale(self):
            return scale
    return Base

@dataclass(frozen=True)
class Mine(factory({closure})):
    ratio: float = 0.1
    constant = {constant}

    @memoized
    def traits(self):
        return {decorated}, {{"a", "b"}}

    @cached_property
    def table(self):
        return [helper(i) + {inner} for i in range(3)]

    def count(self, numel, least={default}):
        if numel in {{"x", "y", "z"}}:
            return 0
        return {body}
"""
PIECES = {
    "helper": "x",
    "closure": "2.0",
    "constant": "3",
    "decorated": "4",
    "inner": "5",
    "default": "6",
    "body": "7",
}


def script(name: str = "script", comment: str = "", **pieces: str) -> Any:
    """Returns a user's module, with some pieces of its code replaced."""
    module = ModuleType(name)
    exec(comment + SOURCE.format(**{**PIECES, **pieces}), vars(module))
    return module


@pytest.mark.parametrize("piece", PIECES)
def test_other_code_of_the_same_class_shows(piece: str) -> None:
    usual, other = (
        script().Mine(),
        script(**{piece: "x + 99" if piece == "helper" else "99"}).Mine(),
    )
    assert identity_of(usual) == identity_of(other)
    assert code_digests(usual) == code_digests(script(comment="# moved\n\n").Mine())
    assert code_digests(usual).keys() == code_digests(other).keys()
    assert code_digests(usual) != code_digests(other)


def test_code_of_functions_in_fields_is_covered() -> None:
    for value in (half, partial(half, 1.0), {"x": half}, Inner(half), [half]):
        assert "test_identity.half" in code_digests(Mine(extra=value))


def test_digests_are_the_same_in_another_process(tmp_path: Path) -> None:
    """Hashes of strings, and so the order of sets, differ between processes."""
    (tmp_path / "script.py").write_text(SOURCE.format(**PIECES))
    program = "import script, gradwire.identity as i; print(i.code_digests(script.Mine()))"
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert "script.Mine" in found[0]


@pytest.mark.parametrize("saved", [None, 3, "{", "[" * 100_000, [], "[]", '{"class": 3}'])
def test_a_broken_identity_is_refused(saved: object) -> None:
    with pytest.raises(ConfigError, match=r"^state: compressor"):
        check_saved_identity("compressor", saved, identity_of(TopK(0.1)))
