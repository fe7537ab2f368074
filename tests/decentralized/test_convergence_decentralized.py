"""Rates on a ring of 16 workers with unlike data: C-GT is linear, compressed SGD stalls."""

from itertools import pairwise
from math import log

import pytest
from quadratics import Quadratics, quadratic_run

from gradwire.decentralized import BEER, CGT, DSGD, ChocoSGD

RING_OF_16 = Quadratics(16)
TOPK = "topk:ratio=0.1,values=fp32"
"""Values of 16 bits end where differences are below 6e-8."""


@pytest.mark.timeout(150)
def test_cgt_reaches_the_optimum_where_compressed_sgd_stalls() -> None:
    settings = {"gamma": 0.48, "lr": 0.015, "nan_policy": "ignore"}
    errors = []
    with quadratic_run(RING_OF_16, CGT, TOPK, **settings) as run:
        for step in range(1, 1601):
            run.step()
            if step % 400 == 0:
                errors.append(run.error())
        sent = run.workers[0].stats()["sent_bytes"]
    assert errors[-1] < 1e-8
    # A straight line in log scale: a factor of about 60 every 400 steps.
    falls = [log(a / b) for a, b in pairwise(errors[1:])]
    assert min(falls) > 3
    assert max(falls) < 1.3 * min(falls)

    with quadratic_run(RING_OF_16, ChocoSGD, TOPK, **settings) as run:
        for _ in range(250):
            run.step()
        early = run.error()
        for _ in range(50):
            run.step()
        assert run.error() == pytest.approx(early, rel=0.05)
        assert early > 1e-2
        messages = 300 * 2 * run.workers[0].gossip.message_bytes()
        assert run.workers[0].stats()["sent_bytes"] == messages
    # Two messages a step to each of two neighbors.
    assert 300 * sent == 1600 * 2 * messages


def test_slopes_on_a_torus() -> None:
    """BEER's error falls by the same factor again and again; that of plain DSGD does not fall."""
    problem = Quadratics(8)
    with quadratic_run(problem, BEER, TOPK, gamma=0.2, lr=0.03, topology="torus") as run:
        errors = []
        for step in range(1, 241):
            run.step()
            if step % 60 == 0:
                errors.append(run.error())
    falls = [log(a / b) for a, b in pairwise(errors)]
    assert min(falls) > 1.5
    assert max(falls) < 1.3 * min(falls)
    with quadratic_run(problem, DSGD, lr=0.03, topology="torus") as run:
        for _ in range(250):
            run.step()
        stalled = run.error()
        for _ in range(50):
            run.step()
    assert run.error() == pytest.approx(stalled, rel=0.05)
    assert stalled > 30 * errors[-1]
