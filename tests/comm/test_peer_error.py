import pytest

from gradwire.comm.process_group import peer_error
from gradwire.errors import PeerError

CLOSED = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[198.18.0.3]:37782. This is typically caused by a remote worker crashing. Check the logs."
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CLOSED, "Connection closed by peer [198.18.0.3]:37782"),
        ("Timed out waiting 2000ms for recv\nframe #0: ...", "Timed out waiting 2000ms for recv"),
        ("something else", "something else"),
    ],
)
def test_the_error_names_collective_rank_and_reason(text: str, reason: str) -> None:
    error = peer_error("gather", 2, 4, 1.26, RuntimeError(text))
    assert isinstance(error, PeerError)
    assert str(error) == f"gather among 4 ranks failed on rank 2 after 1.3 s: {reason}"
