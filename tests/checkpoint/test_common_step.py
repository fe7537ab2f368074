"""The step from which ranks resume, given the files of each; hostile messages are refused."""

import json

import pytest
import torch

from gradwire.checkpoint.common_step import Inventory, _inventory, _read, decide
from gradwire.errors import ConfigError, WireError


def rank(*steps: int, damaged: int = 0, never_saved: bool = False) -> Inventory:
    return Inventory([*steps], damaged, never_saved, "raise", "", "")


def test_the_newest_common_step_counts() -> None:
    assert decide([rank(10, 20, 30), rank(20, 30, 40), rank(10, 20)]) == 20
    assert decide([rank(), rank()]) is None


def test_ranks_with_equal_files_share_a_line() -> None:
    many = [rank(*range(100)) for _ in range(1000)]
    with pytest.raises(ConfigError) as caught:
        decide([*many, rank(damaged=2)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith(": steps [..., 90, 91, 92, 93, 94, 95, 96, 97, 98, 99]")
    assert lines[2] == "  rank [1000]: no intact file, 2 damaged files"


@pytest.mark.parametrize(
    "change",
    [
        {"steps": None}, {"steps": [1.5]}, {"steps": [True]}, {"steps": "12"}, {"damaged": "1"},
        {"damaged": True}, {"never_saved": 1}, {"failure": None}, {"misuse": []},
        {"no_common_step": 3},
    ],
)  # fmt: skip
def test_a_malformed_inventory_is_refused(change: dict[str, object]) -> None:
    refused(json.dumps({**rank(1)._asdict(), **change}).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff", b"[" * 100_000, b"{}"])
def test_other_bytes_are_refused(content: bytes) -> None:
    refused(content)


def refused(content: bytes) -> None:
    row = torch.tensor([*content], dtype=torch.uint8)
    with pytest.raises(WireError, match=r"^rank 3 sent an inventory that cannot be read: "):
        _read(3, row, _inventory)
