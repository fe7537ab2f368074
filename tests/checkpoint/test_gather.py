"""States that rank 0 gathers over the network: equal to what was sent, or refused."""

import json
from typing import Any

import checkpoint_jobs as jobs
import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import gather
from gradwire.checkpoint.description import describe
from gradwire.errors import ConfigError, WireError
from processes import Ranks


def test_rank_0_has_the_states_of_all_ranks(four_ranks: Ranks) -> None:
    """Pieces of 64 bytes cut tensors, and hold several."""
    whole, *others = four_ranks.run(jobs.gather_job, 64)
    assert [*whole] == [f"rank{rank}" for rank in range(4)]
    for rank in range(4):
        assert_equal(whole[f"rank{rank}"], jobs.state_of(rank)[f"rank{rank}"])
    assert [[*state] for state in others] == [["rank1"], ["rank2"], ["rank3"]]


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("length", "content", "message"),
    [
        (1 << 45, b"", r"rank 1 announces 35184372088832 bytes"),
        (-1, b"", r"rank 1 announces -1 bytes"),
        (9, b"\x80\x02garbage", r"rank 1 sent a state that cannot be read"),
    ],
)
def test_a_hostile_rank_is_named(
    four_ranks: Ranks, length: int, content: bytes, message: str
) -> None:
    error, text = four_ranks.run(jobs.hostile_job, length, content)[0]
    assert error == "WireError"
    assert message in text


class Sender:
    """A peer whose bytes are known in advance; notes how much it is asked for at once."""

    def __init__(self, description: object, content: bytes = b"") -> None:
        text = description if isinstance(description, bytes) else json.dumps(description).encode()
        self.left = len(text).to_bytes(8, "little") + text + content
        self.most = 0

    def read(self, nbytes: int) -> Tensor:
        self.most = max(self.most, nbytes)
        assert nbytes <= len(self.left), "more is awaited than was sent"
        piece, self.left = self.left[:nbytes], self.left[nbytes:]
        return torch.frombuffer(bytearray(piece), dtype=torch.uint8)


def limits() -> gather.Limits:
    return gather.limits_of(*describe({"rank0": {"a": torch.zeros(100)}}))


def tensor(*shape: object, dtype: object = "float32") -> list[object]:
    return ["dict", ["rank1", ["tensor", dtype, [*shape]]]]


HOSTILE: dict[str, object] = {
    "pickle": b"\x80\x02}q\x00.",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "many digits": b"1" * 5000,
    "no state": ["list"],
    "a number": 3,
    "no tag": [],
    "an unknown tag": ["dict", ["rank1", ["object", "os.system"]]],
    "a raw object": ["dict", ["rank1", {"a": 1}]],
    "a list as a key": ["dict", [["list"], 1]],
    "a number as a key": ["dict", [1, 1]],
    "a fraction as a key": ["dict", ["rank1", ["dict", [1.5, 1]]]],
    "a key twice": ["dict", ["rank1", 1], ["rank1", 2]],
    "equal keys": ["dict", ["rank1", ["dict", [1, 1], [True, 2]]]],
    "a key without a value": ["dict", ["rank1"]],
    "an item that is no list": ["dict", 5],
    "a terabyte": tensor(1 << 38),
    "terabytes of nothing": tensor(1 << 62, 0),
    "overflow": tensor(1 << 32, 1 << 32),
    "a negative length": tensor(-1),
    "two negative lengths": tensor(-10, -10),
    "a length that is no number": tensor("3"),
    "a length that is a flag": tensor(True),
    "a fraction": tensor(1.5),
    "many dimensions": tensor(*[1] * 100),
    "a shape that is no list": ["dict", ["rank1", ["tensor", "float32", 3]]],
    "an unknown dtype": tensor(1, dtype="load"),
    "a dtype that is no string": tensor(1, dtype=[]),
    "many tensors": ["dict", *([f"a{i}", ["tensor", "float32", [50_000]]] for i in range(10))],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_description_is_refused_before_memory_is_allocated(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    sender = Sender(HOSTILE[case])
    monkeypatch.setattr(torch, "empty", allocate)
    with pytest.raises(WireError, match=r"^rank 5 sent a state that cannot be read: "):
        gather.receive_state(5, sender.read, limits())
    assert not sender.left


def test_memory_is_bounded_by_the_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = limits()
    assert bounds.tensor_bytes == 4 * 400 + (1 << 20)
    count = bounds.tensor_bytes // 4
    sender = Sender(tensor(count), bytes(4 * count))
    monkeypatch.setattr(gather, "PIECE_BYTES", 1000)
    state = gather.receive_state(1, sender.read, bounds)
    assert jobs.tensor_of(state, "rank1").numel() == count
    assert sender.most == 1000
    with pytest.raises(WireError, match=rf"{4 * count + 4} bytes of tensors where {4 * count} is"):
        gather.receive_state(1, Sender(tensor(count + 1)).read, bounds)
    with pytest.raises(WireError, match=r"rank 1 announces 9999999 bytes .* is the most"):
        gather.receive_state(1, lambda _: torch.tensor([9999999]).view(torch.uint8), bounds)


def test_flags_are_0_or_1() -> None:
    flags = tensor(2, dtype="bool")
    assert jobs.tensor_of(
        gather.receive_state(1, Sender(flags, b"\x01\x00").read, limits()), "rank1"
    ).tolist() == [True, False]
    with pytest.raises(WireError, match=r"rank 1 sent a state that cannot be read: .*bool"):
        gather.receive_state(1, Sender(flags, b"\x02\x00").read, limits())


def test_a_rank_cannot_speak_for_another(four_ranks: Ranks) -> None:
    error, text = four_ranks.run(jobs.hostile_job, 18, b'["dict",["rank0"]]')[0]
    assert (error, "cannot be read" in text) == ("WireError", True)
    content = json.dumps(["dict", ["rank0", 1]]).encode()
    error, text = four_ranks.run(jobs.hostile_job, len(content), content)[0]
    assert error == "WireError"
    assert "rank 1 sent the state of ['rank0']" in text


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.eye(2).to_sparse()])
def test_what_has_no_description_is_refused_before_anything_is_sent(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^state: "):
        describe({"rank0": value})


def test_random_damage_is_read_or_refused() -> None:
    """Overwrites three characters of a description: `read` never exceeds the bound either."""
    generator = torch.Generator().manual_seed(0)
    description, _ = describe(jobs.state_of(1))
    bounds = gather.limits_of(*describe(jobs.state_of(0)))
    content = bytes(bounds.tensor_bytes)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(description)
        for place in torch.randint(len(damaged), (3,), generator=generator).tolist():
            damaged[place] = int(torch.randint(32, 127, (1,), generator=generator))
        try:
            gather.receive_state(1, Sender(bytes(damaged), content).read, bounds)
        except WireError:
            refused += 1
    assert 1000 < refused < 2000
