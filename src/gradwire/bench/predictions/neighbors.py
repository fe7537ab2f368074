"""Predicts a step whose workers exchange messages with their neighbors alone.

The exchange of DSGD or CHOCO-SGD: it follows the optimiser's step, so that nothing overlaps. A
worker encodes one message, sends it over each of its edges, and decodes those of its neighbors. The
step is that of the worker with the most neighbors, for which others wait.
"""

from collections.abc import Mapping

from torch import Tensor

from gradwire.bench.predictions.measured_model import MeasuredModel, plan_of
from gradwire.comm.cost_model import Network
from gradwire.decentralized import Mixing
from gradwire.decentralized.base import check_compressor
from gradwire.decentralized.topology import topology_of
from gradwire.perfmodel.overlap import StepTimes
from gradwire.perfmodel.predict import Prediction

CASES = ("none", "efsign", "int4", "topk:ratio=0.1", "topk:ratio=0.01")
"""The methods that are compared if none is given; `none` is DSGD."""


def predict_neighbors(
    measured: MeasuredModel, case: str, topology: str, workers: int, network: Network
) -> Prediction:
    """Returns the predicted step, and the bytes and collectives of the busiest worker in it."""
    mixing = Mixing(topology_of(topology), workers)
    degree = max(mixing.mean_degree(rank) for rank in range(workers))
    senders = 1 + round(degree)
    plan = plan_of(case, measured.tensors, senders)
    check_compressor("simulate --topology", plan.compressor, needs_contraction=True)
    messages = measured.exchange_cost(plan, senders).messages
    encode_s = sum(message.codec_s[0] for message in messages)
    decode_s = sum(sum(message.codec_s[1:]) for message in messages)
    sent_bytes = degree * message_bytes(case, measured.tensors)
    wire_s = network.link_for("neighbors", inside=False).call_s("neighbors", sent_bytes, workers)
    compute_s = measured.compute.compute_s
    step_s = compute_s + encode_s + wire_s + decode_s
    return Prediction(StepTimes(step_s, compute_s, encode_s, wire_s, decode_s), sent_bytes, 1.0)


def message_bytes(case: str, tensors: Mapping[str, Tensor]) -> int:
    """Returns the length of a message about all parameters, with its flag of 4 bytes."""
    return 4 + plan_of(case, tensors, 2).message_bytes(tensors.values())
