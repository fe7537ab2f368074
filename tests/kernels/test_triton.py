"""The Triton kernels in Triton's own interpreter, which needs no GPU: as the reference has them."""

import pytest

from processes import Jobs, Ranks

SPARSE = {
    "positions": {
        "widths": 3,
        "choices": 4,
        "fits": 11,
        "does not fit": 22,
        "blocks": 4,
        "entries": 8,
    },
    "selections": {"selections": 14},
    "borders": {"borders": 16, "stages": 12},
    "messages": {"messages": 15},
    "more messages": {"messages": 15},
    "large": {"messages": 6},
    "casts": {"casts": 20},
}


@pytest.mark.parametrize("part", SPARSE)
def test_sparsifiers(interpreter: Ranks, part: str) -> None:
    assert interpreter.run(Jobs("interpreted_sparse").compare, part) == [SPARSE[part]]


def test_dense_quantisers(interpreter: Ranks) -> None:
    done = {"roundings": 103, "sides": 22, "trits": 22, "signs": 10, "votes": 11}
    assert interpreter.run(Jobs("interpreted").compare) == [done]


def test_thin_factors(interpreter: Ranks) -> None:
    done = {"factors": 16, "orthonormal": 7}
    assert interpreter.run(Jobs("interpreted_lowrank").compare) == [done]
