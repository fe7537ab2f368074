"""Parts of many messages become rows of a matrix, a view if possible."""

import pytest
import torch

from gradwire.wire.layout import as_rows


def test_parts_of_one_buffer_are_a_view() -> None:
    buffer = torch.arange(30.0).view(3, 10)
    rows = as_rows([row[2:6] for row in buffer])
    assert rows.data_ptr() == buffer[0, 2:].data_ptr()
    assert torch.equal(rows, buffer[:, 2:6])


def test_a_repeated_part_is_a_view() -> None:
    part = torch.arange(4)
    rows = as_rows([part] * 3)
    assert rows.data_ptr() == part.data_ptr()
    assert torch.equal(rows, torch.stack([part] * 3))


@pytest.mark.parametrize("order", [(0, 2, 3), (2, 1, 0), (1, 1, 2)])
def test_parts_at_unequal_or_negative_distances_are_copied(order: tuple[int, ...]) -> None:
    buffer = torch.arange(20).view(4, 5)
    parts = [buffer[i] for i in order]
    assert torch.equal(as_rows(parts), torch.stack(parts))


def test_separate_parts_are_copied() -> None:
    parts = [torch.full((3,), float(i)) for i in range(4)]
    assert torch.equal(as_rows(parts), torch.stack(parts))


@pytest.mark.parametrize("count", [1, 3])
def test_empty_parts(count: int) -> None:
    assert as_rows([torch.empty(0)] * count).shape == (count, 0)
