"""Predicted steps among neighbors: bytes of real messages, and one hop however many workers."""

import pytest
from torch.optim import SGD

from gradwire import cli
from gradwire.bench.predictions.measured_model import MeasuredModel, measure_workload
from gradwire.bench.predictions.neighbors import predict_neighbors
from gradwire.bench.workloads.base import parse_workload
from gradwire.comm.cost_model import LinkModel, Network
from gradwire.decentralized import DSGD, ChocoSGD, simulated
from gradwire.errors import ConfigError

NETWORK = Network(LinkModel(latency_s=0.01, rate_bits=1e6))


@pytest.fixture(scope="module")
def measured() -> MeasuredModel:
    return measure_workload(parse_workload("mlp-tiny"))


@pytest.mark.parametrize(
    ("case", "topology", "degree"),
    [("none", "ring", 2), ("topk:ratio=0.1", "torus", 4), ("efsign", "star", 15)],
)
def test_bytes_are_those_of_the_messages(
    measured: MeasuredModel, case: str, topology: str, degree: int
) -> None:
    found = predict_neighbors(measured, case, topology, 16, NETWORK)
    model = parse_workload("mlp-tiny").build()
    optimizer, worker = SGD(model.parameters(), lr=0.1), simulated(16)[0]
    if case == "none":
        gossip = DSGD(model, optimizer, topology=topology, process_group=worker).gossip
    else:
        method = ChocoSGD(
            model, optimizer, case, gamma=0.1, topology=topology, process_group=worker
        )
        gossip = method.gossip
    assert found.sent_bytes == degree * gossip.message_bytes()
    times = found.times
    assert times.wire_s == pytest.approx(0.01 + 8 * found.sent_bytes / 1e6)
    parts_s = times.compute_s + times.encode_s + times.wire_s + times.decode_s
    assert times.step_s == pytest.approx(parts_s)


def test_a_ring_takes_as_long_for_any_number_of_workers(measured: MeasuredModel) -> None:
    steps = {predict_neighbors(measured, "int4", "ring", n, NETWORK).times for n in (4, 64)}
    assert len(steps) == 1


@pytest.mark.parametrize("case", ["powersgd:rank=1", "signsgd", "terngrad"])
def test_methods_that_cannot_be_sent_to_neighbors(measured: MeasuredModel, case: str) -> None:
    with pytest.raises(ConfigError, match="simulate --topology: "):
        predict_neighbors(measured, case, "ring", 8, NETWORK)


def test_steps_do_not_go_with_a_topology(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gradwire", "simulate", "--topology", "ring", "--steps", "3"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        cli.run()
    assert "a topology is part of a case" in "".join(capsys.readouterr())
