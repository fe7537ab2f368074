import pytest

from gradwire.comm.meter import Meter


@pytest.mark.parametrize(("waited_s", "hidden"), [(0.0, 1.0), (1.0, 0.75), (4.0, 0.0), (9.0, 0.0)])
def test_the_share_of_the_exchange_that_nobody_waited_for(waited_s: float, hidden: float) -> None:
    meter = Meter(encode_s=1.0, wire_s=2.0, decode_s=1.0, waited_s=waited_s)
    assert meter.hidden() == hidden


def test_without_an_exchange_nothing_is_hidden() -> None:
    assert Meter(waited_s=1.0).hidden() == 0.0
