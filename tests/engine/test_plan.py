"""Plans: the method of each parameter, legal combinations, and the errors for illegal ones."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.base import Compressor, TwoLevelExchange
from gradwire.comm.cost_model import LinkModel
from gradwire.compressors.bf16 import Bf16
from gradwire.compressors.fp16 import Fp16
from gradwire.compressors.none import NoCompression
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.qsgd import QSGD
from gradwire.compressors.topk import TopK
from gradwire.engine.legality import check_exchange, check_memory
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.auto import choose, gather_s, sharded_s
from gradwire.exchange.gather import GatherExchange
from gradwire.exchange.mean import MeanExchange
from gradwire.memory.none import NoMemory
from gradwire.memory.residual import Residual
from gradwire.spec import compressor_classes, exchange_classes, memory_classes

MATRIX = torch.zeros(64, 64)
ONE_LEVEL = [n for n, cls in exchange_classes().items() if not issubclass(cls, TwoLevelExchange)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def plan_of(spec: Compressor | str, memory: str | None = None, exchange: str = "auto") -> Plan:
    return make_plan(spec, memory, exchange, [MATRIX], size=4)


def lane_of(tensor: Tensor, spec: str, memory: str | None = None, exchange: str = "auto") -> Lane:
    return plan_of(spec, memory, exchange).lane("w", tensor, 0, 4, 0)


def test_a_matrix_is_compressed() -> None:
    lane = lane_of(MATRIX, "topk:ratio=0.01")
    assert lane.compressor == TopK(ratio=0.01)
    assert lane.memory == Residual()
    assert lane.memory_state["residual"].shape == (64 * 64,)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(5000), id="one dimension"),
        pytest.param(torch.tensor(1.0), id="no dimension"),
        pytest.param(torch.zeros(31, 33), id="1023 entries"),
        pytest.param(torch.zeros(0, 64), id="empty"),
    ],
)
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "efsign", "qsgd", "powersgd"])
def test_small_and_one_dimensional_tensors_are_sent_dense(tensor: Tensor, spec: str) -> None:
    lane = lane_of(tensor, spec)
    assert lane.compressor == NoCompression()
    assert lane.memory == NoMemory()
    assert lane.memory_state == {}


def test_the_smallest_compressed_tensor_has_1024_entries() -> None:
    assert lane_of(torch.zeros(32, 32), "efsign").compressor != NoCompression()


def test_tensors_that_would_not_shrink_are_sent_dense() -> None:
    """Factors of rank 32 have as many numbers as the 64 by 64 matrix."""
    assert PowerSGD(rank=32).nbytes((64, 64)) == MATRIX.nbytes
    assert lane_of(MATRIX, "powersgd:rank=32").compressor == NoCompression()
    assert lane_of(MATRIX, "powersgd:rank=31").compressor == PowerSGD(rank=31)
    assert lane_of(MATRIX, "topk:ratio=1,values=fp32").compressor == NoCompression()


def test_the_message_must_be_smaller_than_the_tensor_in_its_own_dtype() -> None:
    """A message takes about 19 bits per entry: fewer than float32, and more than bfloat16."""
    half = MATRIX.to(torch.bfloat16)
    assert lane_of(MATRIX, "randomk:ratio=0.6").compressor != NoCompression()
    assert lane_of(half, "randomk:ratio=0.6").compressor == Bf16()


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_casts_apply_to_every_tensor(spec: str) -> None:
    for tensor in (torch.zeros(3), torch.tensor(1.0), MATRIX):
        assert lane_of(tensor, spec).compressor == plan_of(spec).compressor


@pytest.mark.parametrize(
    ("dtype", "dense"),
    [(torch.float32, NoCompression()), (torch.bfloat16, Bf16()), (torch.float16, Fp16())],
)
def test_dense_means_the_dtype_of_the_parameter(dtype: torch.dtype, dense: Compressor) -> None:
    assert lane_of(torch.zeros(7, dtype=dtype), "topk:ratio=0.01").compressor == dense
    assert lane_of(torch.zeros(64, 64, dtype=dtype), "none").compressor == dense


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_dtypes_of_parameters_are_refused(dtype: torch.dtype) -> None:
    message = (
        f"parameter 'layer.weight' is {dtype}; expected [torch.float32, torch.bfloat16, "
        "torch.float16]"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_of("efsign").lane("layer.weight", torch.zeros(64, 64, dtype=dtype), 0, 4, 0)


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("topk:ratio=0.1", Residual()),
        ("randomk:ratio=0.1", Residual()),
        ("efsign", Residual()),
        ("powersgd", Residual()),
        ("topk:ratio=0.1 | qsgd:bits=4", Residual()),
        ("topk:ratio=0.1 | qsgd:bits=2", NoMemory()),
        ("qsgd:bits=8", NoMemory()),
        ("qsgd:bits=2", NoMemory()),
        ("fp16", NoMemory()),
        ("bf16", NoMemory()),
        ("none", NoMemory()),
    ],
)
def test_default_memory(spec: str, memory: object) -> None:
    assert plan_of(spec).memory == memory


@pytest.mark.parametrize("spec", ["none", "fp16", "randomk:ratio=0.1", "powersgd"])
def test_summable_messages_use_the_mean(spec: str) -> None:
    assert str(plan_of(spec).exchange) == "mean"


@pytest.mark.parametrize("spec", ["bf16", "fp16", "randomk:ratio=0.1,values=bf16"])
def test_16_bit_sums_are_not_used_with_a_residual(spec: str) -> None:
    assert str(plan_of(spec, "residual").exchange) == "gather"


def test_long_messages_of_many_ranks_are_sharded() -> None:
    tensors = [torch.zeros(1000, 1000)] * 6
    assert str(make_plan("efsign", None, "auto", tensors, size=2).exchange) == "gather"
    assert str(make_plan("efsign", None, "auto", tensors, size=16).exchange) == "sharded"
    assert str(make_plan("topk:ratio=0.1", None, "auto", tensors, size=16).exchange) == "gather"
    assert str(make_plan("topk:ratio=0.1", None, "auto", tensors, size=64).exchange) == "sharded"


@pytest.mark.parametrize(("sparse", "clearly"), [(False, 2), (True, 9)])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 1024])
@pytest.mark.parametrize("nbytes", [0, 100, 10**4, 10**6, 10**8])
def test_gather_unless_sharded_is_clearly_cheaper(
    nbytes: int, size: int, sparse: bool, clearly: float
) -> None:
    link = LinkModel(latency_s=1e-3, rate_bits=1e8)
    gather, sharded = gather_s(nbytes, size, link), sharded_s(nbytes, size, link)
    if gather <= sharded:
        assert choose(nbytes, size, link, sparse=sparse) == "gather"
    if gather >= clearly * sharded > 0:
        assert choose(nbytes, size, link, sparse=sparse) == "sharded"


def test_costs_of_a_link_by_hand() -> None:
    """Four ranks, a megabyte at 8 Mbit/s: three whole messages, or six quarters."""
    link = LinkModel(latency_s=0.5, rate_bits=8e6)
    assert gather_s(10**6, 4, link) == pytest.approx(3 * (0.5 + 1))
    assert sharded_s(10**6, 4, link) == pytest.approx(0.5 + 0.75 + 3 * (0.5 + 0.25))


def test_the_requested_exchange_is_used() -> None:
    assert isinstance(lane_of(MATRIX, "randomk:ratio=0.1").aggregator, MeanExchange)
    assert isinstance(
        lane_of(MATRIX, "randomk:ratio=0.1", exchange="gather").aggregator, GatherExchange
    )
    assert lane_of(MATRIX, "powersgd").aggregator == PowerSGD()


@pytest.mark.parametrize(
    ("spec", "memory", "exchange", "message"),
    [
        (
            "qsgd:bits=2",
            "residual",
            "auto",
            "qsgd:bits=2 does not go with memory 'residual', which needs a contraction: its "
            "variance bound with bits=2, bucket=128 is 11.3, not below 1 (use more bits, a "
            "smaller bucket, or scaled=true); use memory 'none'",
        ),
        (
            "topk:ratio=0.1 | qsgd:bits=2",
            "residual",
            "auto",
            "topk:ratio=0.1 | qsgd:bits=2 does not go with memory 'residual', which needs a "
            "contraction: its variance bound with bits=2",
        ),
        (
            "topk:ratio=0.1",
            None,
            "mean",
            "topk:ratio=0.1 does not go with exchange 'mean': its messages cannot be summed; use "
            "exchange 'gather', 'leader' or 'sharded'",
        ),
        (
            "powersgd",
            None,
            "gather",
            "powersgd does not go with exchange 'gather': it defines its own rounds; use exchange "
            "'mean'",
        ),
        (
            "powersgd:rank=2",
            None,
            "sharded",
            "powersgd:rank=2 does not go with exchange 'sharded': it defines its own rounds",
        ),
        (
            "bf16",
            "residual",
            "mean",
            "bf16 does not go with exchange 'mean': sums in 16 bits lose what memory 'residual' "
            "cannot see; use exchange 'gather' or 'sharded'",
        ),
        (
            "efsign",
            None,
            "hierarchical:node=2,between=mean",
            "efsign does not go with exchange 'mean': its messages cannot be summed; use between "
            "'gather' or 'sharded'",
        ),
        ("efsign", None, "gossip", "no exchange named 'gossip'"),
        ("efsign", "momento", "auto", "no memory named 'momento'"),
    ],
)
def test_illegal_combinations_are_refused(
    spec: str, memory: str | None, exchange: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_of(spec, memory, exchange)


@pytest.mark.parametrize("name", compressor_classes())
def test_a_refusal_lists_exactly_what_is_legal(name: str) -> None:
    cls = compressor_classes()[name]
    for example in cls.examples:
        method = cls(**example)
        legal: dict[str, set[str]] = {"memory": set(), "exchange": set()}
        refused: dict[str, set[str]] = {"memory": set(), "exchange": set()}
        tried = [("memory", (memory, "auto")) for memory in memory_classes()]
        tried += [("exchange", (None, exchange)) for exchange in ONE_LEVEL]
        for noun, (memory, exchange) in tried:
            try:
                plan_of(method, memory, exchange)
                legal[noun].add(str(memory or exchange))
            except ConfigError as error:
                *_, advice = str(error).rpartition(f"; use {noun} ")
                refused[noun].add(advice)
        for noun, advices in refused.items():
            for advice in advices:
                assert set(re.findall(r"'([^']+)'", advice)) == legal[noun] != set()


def test_check_refuses_another_illegal_setting() -> None:
    plan = plan_of("qsgd:bits=8", "residual", "gather")
    plan.check(QSGD(bits=4))
    with pytest.raises(ConfigError, match="qsgd:bits=2 does not go with memory 'residual'"):
        plan.check(QSGD(bits=2))
    with pytest.raises(ConfigError, match="powersgd does not go with exchange 'gather'"):
        plan.check(PowerSGD())


def test_an_object_that_is_no_compressor_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a spec string or a compressor, got 3"):
        plan_of(3)  # type: ignore[arg-type]


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got the class QSGD; make one, like QSGD\(bits=4\)"):
        plan_of(QSGD)  # type: ignore[arg-type]


def test_an_object_that_is_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a memory or its spec, got 3"):
        plan_of("efsign", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", [None, 3])
def test_an_object_that_is_no_exchange_is_refused(exchange: Any) -> None:
    with pytest.raises(ConfigError, match=f"exchange: a spec must be a string, got {exchange}"):
        plan_of("efsign", "residual", exchange)


def test_instances_and_specs_give_equal_plans() -> None:
    assert plan_of(QSGD(bits=8)) == plan_of("qsgd:bits=8")
    assert make_plan("efsign", Residual(), "auto", [MATRIX], 2) == make_plan(
        "efsign", "residual", "auto", [MATRIX], 2
    )


def test_a_plan_describes_itself() -> None:
    assert plan_of("topk:ratio=0.01", "residual:decay=0.9", "gather").describe() == {
        "spec": "topk:ratio=0.01",
        "memory": "residual:decay=0.9",
        "exchange": "gather",
    }


def test_the_identity_of_a_plan_has_all_settings() -> None:
    plan = plan_of("topk:ratio=0.01", exchange="hierarchical:node=2,between=gather")
    assert plan.identity() == {
        "compressor": {"class": "TopK", "ratio": 0.01, "values": "bf16"},
        "memory": {"class": "Residual", "decay": 1.0},
        "exchange": {
            "class": "HierarchicalExchange",
            "node": 2,
            "between": {
                "class": "GatherExchange",
                "aggregate": "mean",
                "faulty": -1,
                "mix": False,
            },
        },
        "chunk_bytes": 0,
    }
    assert plan.code_digests() == {}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize(
    "spec", ["none", "fp16", "bf16", "topk:ratio=0.1", "randomk:ratio=0.1", "efsign", "powersgd"]
)
def test_every_lane_of_a_plan_is_legal(spec: str, memory: str, dtype: torch.dtype) -> None:
    """Holds also where the plan sends a tensor dense."""
    plan = plan_of(spec, memory)
    for shape in [(64, 64), (7,)]:
        lane = plan.lane("w", torch.zeros(shape, dtype=dtype), 0, 4, 0)
        check_memory(lane.compressor, lane.memory)
        check_exchange(lane.compressor, lane.memory, plan.exchange)


def test_lanes_of_different_names_draw_different_numbers() -> None:
    keys = {
        plan_of("efsign").lane(name, MATRIX, 0, 4, seed).ctx.shared_key()
        for name in ("a.b", "b.a", "ab")
        for seed in (0, 1)
    }
    assert len(keys) == 6


def test_settings_of_an_exchange_do_not_apply_to_multi_round_methods() -> None:
    with pytest.raises(ConfigError, match="its own rounds, which do not have this setting"):
        make_plan("signum", None, "gather:aggregate=median", [torch.zeros(64, 64)], 4)
