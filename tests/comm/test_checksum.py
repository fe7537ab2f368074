import pytest
import torch

from gradwire.comm.base import Collective
from gradwire.comm.checksum import CRC_BYTES, opened, sealed
from gradwire.errors import WireError


def message(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 1000])
@pytest.mark.parametrize("kind", ["gather", "scatter", "broadcast"])
def test_what_is_sealed_can_be_opened(kind: str, nbytes: int) -> None:
    call = sealed(Collective(kind, [message(nbytes)], [nbytes]))  # type: ignore[arg-type]
    assert call.sizes == [nbytes + CRC_BYTES]
    assert call.buffers[0].numel() == nbytes + CRC_BYTES
    assert torch.equal(opened(call, call.buffers, 0)[0], message(nbytes))


def test_every_single_bit_counts() -> None:
    call = sealed(Collective("gather", [message(50)]))
    for bit in range(8 * (50 + CRC_BYTES)):
        changed = call.buffers[0].clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        for own in (0, 1):
            with pytest.raises(WireError, match="rank 1 was changed"):
                opened(call, [call.buffers[0], changed], own)


def test_a_message_from_elsewhere_with_its_own_crc_is_opened() -> None:
    call, other = (sealed(Collective("gather", [message(nbytes)])) for nbytes in (50, 60))
    answers = opened(call, [other.buffers[0], call.buffers[0].clone()], 1)
    assert [answer.numel() for answer in answers] == [60, 50]


def test_sums_go_as_they_are() -> None:
    call = Collective("mean", [torch.ones(3)])
    assert sealed(call) is call
    assert opened(call, call.buffers, 0) is call.buffers
