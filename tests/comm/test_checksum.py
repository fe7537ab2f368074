import pytest
import torch

from gradwire.comm.base import Collective
from gradwire.comm.checksum import CRC_BYTES, verified, with_checksum
from gradwire.errors import WireError


def message(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 1000])
@pytest.mark.parametrize("kind", ["gather", "all_to_all", "broadcast"])
def test_a_message_with_a_checksum_is_verified(kind: str, nbytes: int) -> None:
    call = with_checksum(Collective(kind, [message(nbytes)], [nbytes]))  # type: ignore[arg-type]
    assert call.sizes == [nbytes + CRC_BYTES]
    assert call.buffers[0].numel() == nbytes + CRC_BYTES
    assert torch.equal(verified(call, call.buffers, 0)[0], message(nbytes))


def test_every_flipped_bit_is_detected() -> None:
    call = with_checksum(Collective("gather", [message(50)]))
    for bit in range(8 * (50 + CRC_BYTES)):
        changed = call.buffers[0].clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        for own in (0, 1):
            with pytest.raises(WireError, match="rank 1 was corrupted"):
                verified(call, [call.buffers[0], changed], own)


def test_a_message_of_another_rank_is_verified_by_its_own_crc() -> None:
    call, other = (with_checksum(Collective("gather", [message(nbytes)])) for nbytes in (50, 60))
    answers = verified(call, [other.buffers[0], call.buffers[0].clone()], 1)
    assert [answer.numel() for answer in answers] == [60, 50]


@pytest.mark.parametrize("nbytes", [4, 8, 40])
def test_messages_in_one_buffer_are_aligned_as_without_a_checksum(nbytes: int) -> None:
    """A gather receives all messages into one buffer; receivers read words of 4 or 8 bytes."""
    call = with_checksum(Collective("gather", [message(nbytes)], [nbytes] * 3))
    received = torch.cat(call.buffers * 3).view(3, -1)
    for row in verified(call, [*received], 0):
        assert row.storage_offset() % min(nbytes, 8) == 0
        assert torch.equal(row, message(nbytes))


def test_a_mean_has_no_checksum() -> None:
    call = Collective("mean", [torch.ones(3)])
    assert with_checksum(call) is call
    assert verified(call, call.buffers, 0) is call.buffers
