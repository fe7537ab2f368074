"""Per-parameter policies: the grammar, which method a parameter gets, and what knows of it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import gradwire
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.integrations.reduce_scatter import reduce_scatter_plan
from gradwire.policies import Policies, find_policies
from gradwire.simulation import Simulation

SHAPES = {
    "embed.weight": (96, 40),
    "layer.weight": (64, 48),
    "layer.bias": (64,),
    "norm.weight": (64,),
    "head.weight": (48, 64),
}
TENSORS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
TEXT = '"*embed*": int4; "*norm*": none; default: powersgd:rank=4'
WORKERS = 4


def test_the_documented_yaml_means_the_same_as_the_string() -> None:
    page = Path(__file__).parents[1] / "docs" / "how-to" / "policies.md"
    [block] = re.findall("```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    from_yaml = find_policies(yaml.safe_load(block))
    assert from_yaml == find_policies(f"{TEXT} @ memory=residual")


def gradients(step: int, size: int = WORKERS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(size)
    ]


def simulated(method: Any, **options: Any) -> Simulation:
    return gradwire.simulate(TENSORS, method, workers=WORKERS, **options)


def plan(method: Any, **options: Any) -> Plan:
    given = {"memory": None, "exchange": "auto", **options}
    return make_plan(method, given["memory"], given["exchange"], TENSORS, WORKERS)


def rows(simulation: Simulation) -> dict[str, dict[str, Any]]:
    found = simulation.stats()["policies"]
    assert isinstance(found, list)
    return {row["pattern"]: row for row in found}


@pytest.mark.parametrize(
    "given",
    [
        TEXT,
        "*embed*: int4; *norm*: none; default: powersgd:rank=4",
        "'*embed*':int4;'*norm*' : none ;default:powersgd:rank=4;",
        {
            "*embed*": "int4",
            "*norm*": gradwire.parse("none"),
            "default": {"method": "powersgd:rank=4"},
        },
    ],
    ids=["quotes", "plain", "other quotes", "mapping"],
)
def test_all_forms_are_the_same_policies(given: str | Mapping[str, object]) -> None:
    assert find_policies(given) == find_policies(TEXT)
    assert str(find_policies(given)) == TEXT


@pytest.mark.parametrize("spec", ["topk:ratio=0.1 | qsgd:bits=4", "none", "dct:k=4,chunk=64"])
def test_a_spec_is_no_policy(spec: str) -> None:
    assert find_policies(spec) is None
    assert find_policies(gradwire.parse(spec)) is None


def test_options_of_a_policy_read_back() -> None:
    text = '"*w*": topk:ratio=0.1 @ memory=(momentum:momentum=0.8,nesterov=true), exchange=gather; '
    found = find_policies(text + "default: none")
    assert isinstance(found, Policies)
    assert find_policies(str(found)) == found
    as_mapping = {
        "*w*": {
            "method": "topk:ratio=0.1",
            "memory": "momentum:momentum=0.8,nesterov=true",
            "exchange": "gather",
        },
        "default": "none",
    }
    assert find_policies(as_mapping) == found


def test_the_first_match_counts() -> None:
    found = plan("embed.*: int4; *.weight: fp16; default: none")
    methods = {name: type(found.method_of(name).compressor).__name__ for name in SHAPES}
    expected = ["Int4", "Fp16", "NoCompression", "Fp16", "Fp16"]
    assert methods == dict(zip(SHAPES, expected, strict=True))


@pytest.mark.parametrize("exchange", ["auto", "hierarchical:node=2"])
def test_every_parameter_gets_the_mean_of_its_own_method(exchange: str) -> None:
    """It is that of a model which has this parameter alone, but for the order of sums."""
    policies = {
        "embed*": "int4",
        "layer.w*": "topk:ratio=0.1 @ memory=none",
        "norm*": "none",
        "default": "efsign",
    }
    alone: dict[str, Simulation] = {}
    for name, spec in zip(
        SHAPES, ["int4", "topk:ratio=0.1", "efsign", "none", "efsign"], strict=True
    ):
        memory = "none" if name == "layer.weight" else None
        own = {name: TENSORS[name]}
        alone[name] = gradwire.simulate(
            own, spec, workers=WORKERS, memory=memory, exchange=exchange
        )
    together = simulated(policies, exchange=exchange)
    for step in range(3):
        grads = gradients(step)
        means = together.step(grads)
        for name, network in alone.items():
            [expected] = network.step([{name: g[name]} for g in grads]).values()
            torch.testing.assert_close(means[name], expected, rtol=1e-5, atol=1e-6)


def test_statistics_know_the_policies() -> None:
    network = simulated(TEXT)
    network.step(gradients(0))
    stats, found = network.stats(), rows(network)
    assert stats["spec"] == TEXT
    assert stats["memory"] == "residual and none"
    assert [*found] == ["*embed*", "*norm*", "default"]
    assert {p: (r["parameters"], r["compressed"]) for p, r in found.items()} == {
        "*embed*": (1, 1),
        "*norm*": (1, 0),
        "default": (3, 2),
    }
    assert found["*embed*"]["message_bytes"] == gradwire.parse("int4").nbytes((96, 40))
    assert found["*embed*"]["residual_norm"] > 0
    assert found["*norm*"]["residual_norm"] == 0
    # What the default would send uncompressed shares its collectives.
    assert found["*norm*"]["exchange"] == found["default"]["exchange"] == "mean"


def test_one_run_resumes_bitwise_and_others_are_refused() -> None:
    network, again = simulated(TEXT), simulated(TEXT)
    network.step(gradients(0))
    again.load_state_dict(network.state_dict())  # type: ignore[arg-type]
    here, there = network.step(gradients(1)), again.step(gradients(1))
    assert all(torch.equal(here[name], there[name]) for name in SHAPES)
    for other, text in [
        (TEXT.replace("int4", "efsign"), "policy 0 '*embed*'.compressor.class is"),
        (TEXT.replace("rank=4", "rank=2"), "policy 2 'default'.compressor.rank is"),
        ("powersgd:rank=4", "policy 0 '*embed*' is {"),
    ]:
        with pytest.raises(gradwire.ConfigError) as refused:
            simulated(other).load_state_dict(network.state_dict())  # type: ignore[arg-type]
        assert text in str(refused.value)


def test_switching_keeps_residuals_of_parameters_whose_memory_stays() -> None:
    network = simulated("topk:ratio=0.1")
    network.step(gradients(0))
    lanes = network.workers[0].lanes
    kept = lanes["embed.weight"].memory_state["residual"].clone()
    network.switch("layer*: fp16; default: topk:ratio=0.2")
    lanes = network.workers[0].lanes
    assert torch.equal(lanes["embed.weight"].memory_state["residual"], kept)
    assert lanes["layer.weight"].memory_state == {}
    network.switch("topk:ratio=0.1")
    assert "policies" not in network.stats()


def test_chunks_are_those_of_each_method() -> None:
    """Blocks of a method are never cut; a chunk has the policy of its parameter."""
    text = "embed*: int4:block=320; layer*: topk:ratio=0.1; default: none"
    network = simulated(text, chunk_bytes=4096)
    worker = network.workers[0]
    assert {name: len(chunks) for name, chunks in worker.chunks.items()} == {
        "embed.weight": 4,
        "layer.weight": 4,
    }
    assert all(chunk.start * 40 % 320 == 0 for chunk in worker.chunks["embed.weight"])
    network.step(gradients(0))
    assert (
        rows(network)["embed*"]["message_bytes"]
        > gradwire.parse("int4:block=320").nbytes((96, 40)) / 2
    )
    with pytest.raises(gradwire.ConfigError, match="chunk_bytes must be at least"):
        simulated(text, chunk_bytes=512)


def test_a_controller_sets_the_default_alone() -> None:
    network = simulated(
        "embed*: topk:ratio=0.5; default: topk:ratio=0.5", controller="schedule:last=0.1,after=1"
    )
    for step in range(4):
        network.step(gradients(step))
    lanes = network.workers[0].lanes
    assert lanes["embed.weight"].compressor == gradwire.TopK(ratio=0.5)
    assert lanes["layer.weight"].compressor != gradwire.TopK(ratio=0.5)


def test_votes_keep_the_loss_scale_of_other_parameters() -> None:
    network = simulated("embed*: signsgd; default: none")
    for worker in network.workers:
        worker.loss_scale_changed(8.0)
    grads = gradients(0)
    means = network.step(grads)
    assert set(means["embed.weight"].unique().tolist()) <= {-8.0, 0.0, 8.0}
    expected = torch.stack([g["head.weight"] for g in grads]).mean(0)
    torch.testing.assert_close(means["head.weight"], expected)


def test_nonfinite_gradients_of_one_policy_skip_the_step_of_all() -> None:
    """A robust aggregation tolerates them only if that of all parameters does."""
    for text, skipped in [
        ("embed*: topk:ratio=0.1 @ exchange=gather:aggregate=median; default: int4", 1),
        ("embed*: topk:ratio=0.1; default: efsign", 0),
    ]:
        exchange = "auto" if skipped else "gather:aggregate=median"
        network = simulated(text, exchange=exchange)
        grads = gradients(0)
        grads[2]["embed.weight"][3, 3] = torch.nan
        network.step(grads)
        assert network.stats()["skipped"] == skipped


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("*emb: int4; default: none", "policies: no parameter matches '*emb'; there are 'embed.w"),
        (
            "*.weight: int4; embed*: none; default: none",
            "such as 'embed.weight', match '*.weight' before it; the",
        ),
        (
            "*embed*: int4; *norm*: none",
            "policies: parameter 'layer.weight' matches no pattern; add",
        ),
        ("default: none; embed*: int4", "default must come last, since the first match counts"),
        ("*a*: int4; *a*: none; default: none", "policies: '*a*' is given twice"),
        ("*a*; default: none", "policies: expected 'pattern: method', got '*a*'"),
        ("'*a* x: int4; default: none", "expected 'pattern: method'"),
        ("*w*: int4 @; default: none", "policies: nothing after the @"),
        (
            "*w*: int4 @ seed=3; default: none",
            "policy '*w*': unknown option ['seed'], expected ['mem",
        ),
        ("*w*: tpk; default: none", "policy '*w*': no compressor named 'tpk'; did you mean"),
        ("*w*: auto; default: none", "policy '*w*': no compressor named 'auto'"),
        (
            "*.bias: int4; default: none",
            "policy '*.bias': int4 would compress none of its 1 parame",
        ),
        (
            "*w*: terngrad @ memory=residual; default: none",
            "policy '*w*': terngrad does not go with",
        ),
        (
            "*w*: powersgd @ exchange=gather; default: none",
            "policy '*w*': powersgd does not go with",
        ),
        (
            "*w*: topk:ratio=0.1 @ exchange=hierarchical:node=2; default: none",
            "must be hierarchical with the same node",
        ),
        ({}, "policies: expected at least one pattern"),
        ({1: "int4"}, "policies: a pattern must be a string, got 1"),
        ({"*w*": 3}, "policy '*w*': expected a spec string or a compressor, got 3"),
        ({"*w*": {"memory": "none"}}, "policies: '*w*' has no 'method', got ['memory']"),
    ],
)
def test_wrong_policies_are_refused_by_name(text: Any, error: str) -> None:
    with pytest.raises(gradwire.ConfigError) as refused:
        plan(text)
    assert error in str(refused.value)


def test_places_without_names_of_parameters_refuse_policies() -> None:
    with pytest.raises(gradwire.ConfigError, match="policies need the names of parameters"):
        make_plan(TEXT, None, "auto", TENSORS.values(), WORKERS)
    with pytest.raises(gradwire.ConfigError, match="expected one method for all parameters"):
        gradwire.parse(TEXT)


def test_a_reduce_scatter_has_policies_without_exchanges() -> None:
    found = reduce_scatter_plan(TEXT, None, "auto", TENSORS, WORKERS)
    assert [str(method.exchange) for method in found.methods] == ["sharded", "sharded", "mean"]
    with pytest.raises(gradwire.ConfigError, match=r"policy '\*w\*': a reduce-scatter is "):
        reduce_scatter_plan(
            "*w*: int4 @ exchange=gather; default: none", None, "auto", TENSORS, WORKERS
        )


def test_local_methods_with_fragments_have_policies() -> None:
    """A pattern may match in one fragment only, but must match somewhere."""
    text = "0.weight: int4; default: topk:ratio=0.1"
    group, workers = gradwire.local.simulated(2), list[gradwire.local.DiLoCo]()
    for own in group:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"sync_every": 2, "fragments": 2, "process_group": own}
        workers.append(gradwire.local.DiLoCo(model, optimizer, text, **settings))
        with pytest.raises(gradwire.ConfigError, match="no parameter matches '7"):
            gradwire.local.DiLoCo(model, optimizer, "7*: int4; default: none", **settings)
    for worker in workers:
        found = worker.stats()["policies"]
        assert isinstance(found, list)
        assert [row["pattern"] for row in found] == ["0.weight", "default", "default"]
        assert "plans" in worker.settings()
