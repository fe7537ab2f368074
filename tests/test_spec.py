"""Spec strings: the objects they describe, and the errors for wrong ones."""

import re
from typing import Any, get_args

import pytest

import gradwire
from gradwire.base import Compressor
from gradwire.base.aggregation import Aggregation
from gradwire.compressors._sparsifier import Pipeline
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.qsgd import QSGD
from gradwire.compressors.topk import TopK
from gradwire.errors import ConfigError
from gradwire.exchange.gather import GatherExchange
from gradwire.exchange.hierarchical import HierarchicalExchange
from gradwire.memory.residual import Residual
from gradwire.spec import (
    ExchangeConfig,
    compressor_classes,
    example_of,
    exchange_classes,
    exchange_of,
    find_exchange,
    format_spec,
    memory_classes,
    name_of,
    parse,
    parse_exchange,
    parse_memory,
)

THERE_ARE = ", ".join(compressor_classes())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("topk:ratio=0.01", TopK(ratio=0.01)),
        ("  topk : ratio = 1e-3 , values = fp32  ", TopK(ratio=0.001, values="fp32")),
        ("topk:values=fp16,ratio=1", TopK(ratio=1.0, values="fp16")),
        ("qsgd", QSGD()),
        ("qsgd:bits=8,bucket=512,norm=l2", QSGD(bits=8, bucket=512, norm="l2")),
        ("qsgd:bits=8,", QSGD(bits=8)),
        ("powersgd:rank=4", PowerSGD(rank=4)),
        ("topk:ratio=0.01 | qsgd:bits=4", Pipeline(TopK(ratio=0.01), QSGD(bits=4))),
        ("topk:ratio=0.01|qsgd", Pipeline(TopK(ratio=0.01), QSGD())),
    ],
)
def test_parse(spec: str, expected: Compressor) -> None:
    assert parse(spec) == expected


@pytest.mark.parametrize(
    ("item", "spec"),
    [
        (TopK(ratio=0.01), "topk:ratio=0.01"),
        (TopK(ratio=0.01, values="bf16"), "topk:ratio=0.01"),
        (TopK(ratio=1e-5, values="fp32"), "topk:ratio=1e-05,values=fp32"),
        (QSGD(), "qsgd"),
        (QSGD(bits=2, norm="l2"), "qsgd:bits=2,norm=l2"),
        (Pipeline(TopK(ratio=0.1), QSGD(bits=8)), "topk:ratio=0.1 | qsgd:bits=8"),
    ],
)
def test_format_leaves_out_defaults_and_reads_back(item: Compressor, spec: str) -> None:
    assert format_spec(item) == spec
    assert parse(spec) == item


@pytest.mark.parametrize("memory", [Residual(), Residual(decay=0.9)])
def test_memories_format_and_read_back(memory: Residual) -> None:
    assert parse_memory(format_spec(memory)) == memory


@pytest.mark.parametrize("spec", ["ef21-sgdm:eta=0.5", "ef21_sgdm:eta=0.5"])
def test_hyphens_and_underscores_are_the_same_in_names(spec: str) -> None:
    """Module names cannot have hyphens, but specs may."""
    memory = parse_memory(spec)
    assert name_of(memory) == "ef21-sgdm"
    assert format_spec(memory) == "ef21-sgdm:eta=0.5"
    assert parse_memory(format_spec(memory)) == memory


def test_names_are_shown_with_hyphens() -> None:
    for catalogue in (compressor_classes(), memory_classes(), exchange_classes()):
        assert not [name for name in catalogue if "_" in name]
    with pytest.raises(ConfigError, match="did you mean 'ef21-sgdm'"):
        parse_memory("ef21-sgmd")
    with pytest.raises(ConfigError, match=r"^ef21-sgdm: unknown parameter"):
        parse_memory("ef21_sgdm:beta=1")


def test_names_of_pipelines() -> None:
    assert name_of(Pipeline(TopK(ratio=0.1), QSGD())) == "topk|qsgd"
    assert name_of(QSGD()) == "qsgd"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("top_k", "no compressor named 'top_k'; did you mean 'topk'?"),
        ("powersdg:rank=1", "no compressor named 'powersdg'; did you mean 'powersgd'?"),
        ("TopK:ratio=0.1", "no compressor named 'TopK'; did you mean 'topk'?"),
        ("x264", f"no compressor named 'x264'; there are {THERE_ARE}"),
        ("", f"no compressor named ''; there are {THERE_ARE}"),
        ("  ", f"no compressor named ''; there are {THERE_ARE}"),
        (":ratio=0.1", f"no compressor named ''; there are {THERE_ARE}"),
        ("topk:ratoi=0.1", "topk: unknown parameter ['ratoi'], expected ['ratio', 'values']"),
        (
            "qsgd:b=1,a=2",
            "qsgd: unknown parameter ['a', 'b'], expected ['bits', 'bucket', 'norm', 'scaled']",
        ),
        ("none:x=1", "none: unknown parameter ['x'], expected []"),
        ("topk", "topk: missing parameter ['ratio'], as in 'topk:ratio=0.01'"),
        ("topk:values=fp32", "topk: missing parameter ['ratio'], as in 'topk:ratio=0.01'"),
        ("topk:ratio=lots", "topk: ratio must be of type float, got 'lots'"),
        ("qsgd:bits=4.5", "qsgd: bits must be of type int, got '4.5'"),
        (
            "topk:ratio=0.1,values=fp8",
            "topk: values must be one of ['fp32', 'bf16', 'fp16'], got 'fp8'",
        ),
        ("qsgd:norm=l1", "qsgd: norm must be one of ['max', 'l2'], got 'l1'"),
        ("topk:ratio=1.5", "topk: ratio must be in (0, 1], got 1.5"),
        ("topk:ratio=nan", "topk: ratio must be in (0, 1], got nan"),
        ("qsgd:bits=9", "qsgd: bits must be 2 to 8, got 9"),
        ("topk:ratio=0.1,ratio=0.2", "topk: ratio is set twice in 'topk:ratio=0.1,ratio=0.2'"),
        ("topk:", "topk: nothing after the colon in 'topk:'"),
        ("qsgd: ", "qsgd: nothing after the colon in 'qsgd: '"),
        (
            "topk:0.1",
            "topk: expected key=value, got '0.1' in 'topk:0.1'; an example is 'topk:ratio=0.01'",
        ),
        (
            "topk:ratio=",
            "topk: expected key=value, got 'ratio=' in 'topk:ratio='; an example is "
            "'topk:ratio=0.01'",
        ),
        (
            "topk:ratio=0.1 values=fp32",
            "topk: ratio must be of type float, got '0.1 values=fp32'; settings are separated by "
            "commas",
        ),
        ("QSGD", "no compressor named 'QSGD'; did you mean 'qsgd'?"),
        (
            "__main__.Mine:ratio=0.1",
            "no compressor named '__main__.Mine'; a compressor of your own is given as an object, "
            "or by its registered name",
        ),
        ("(", f"no compressor named '('; there are {THERE_ARE}"),
        ("topk:ratio=0.1 |", f"no compressor named ''; there are {THERE_ARE}"),
        ("| qsgd", f"no compressor named ''; there are {THERE_ARE}"),
        (
            "topk:ratio=0.1 | qsgd | fp16",
            "'topk:ratio=0.1 | qsgd | fp16': the second of three stages is a sparsifier, qsgd is "
            "none",
        ),
        (
            "topk:ratio=1 | sidco:ratio=1 | qsgd | none",
            "a pipeline has at most 3 stages, got 4 in 'topk:ratio=1 | sidco:ratio=1 | qsgd | "
            "none': one or two sparsifiers, and a method of one message that encodes the values "
            "they select",
        ),
        (
            "qsgd | efsign",
            "'qsgd | efsign': a pipeline starts with a sparsifier, qsgd is none",
        ),
        (
            "topk:ratio=1 | randomk:ratio=1",
            "'topk:ratio=1 | randomk:ratio=1': a pipeline ends with a quantiser, randomk is none",
        ),
        (
            "topk:ratio=0.1 | powersgd",
            "'topk:ratio=0.1 | powersgd': a pipeline ends with a quantiser, powersgd is none",
        ),
    ],
)
def test_wrong_specs_raise_readable_errors(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "right"),
    [
        ("topk ratio=0.01", "topk:ratio=0.01"),
        ("topk ratio = 0.02, values = fp32", "topk:ratio=0.02,values=fp32"),
        ("topk(ratio=0.03)", "topk:ratio=0.03"),
        ("TopK(ratio=0.03)", "topk:ratio=0.03"),
        ("topk,ratio=0.04", "topk:ratio=0.04"),
        ("top_k ratio=0.05", "topk:ratio=0.05"),
        # What the number means is not known, so the usual setting is the example.
        ("topk(0.03)", "topk:ratio=0.01"),
        ("topk@0.03", "topk:ratio=0.01"),
        ("topk=0.03", "topk:ratio=0.01"),
        ("topk 0.03", "topk:ratio=0.01"),
    ],
)
def test_settings_without_a_colon_show_the_right_form(spec: str, right: str) -> None:
    parse(right)
    with pytest.raises(ConfigError, match="no compressor named") as caught:
        parse(spec)
    assert str(caught.value).endswith(f"; settings follow a colon, as in {right!r}")


def test_examples_in_errors_can_be_parsed() -> None:
    for catalogue, read in (
        (compressor_classes(), parse),
        (memory_classes(), parse_memory),
        (exchange_classes(), parse_exchange),
    ):
        for name, cls in catalogue.items():
            read(example_of(name, cls))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None"),
        (3, "3"),
        (TopK(ratio=0.01), "TopK(ratio=0.01, values='bf16')"),
        (TopK, "the class TopK; make one, like TopK(ratio=0.01)"),
        (Residual, "the class Residual; make one, like Residual()"),
    ],
)
def test_a_spec_must_be_a_string(given: Any, shown: str) -> None:
    calls = {"compressor": parse, "memory": parse_memory, "exchange": find_exchange}
    for noun, call in calls.items():
        message = f"{noun}: a spec must be a string, got {shown}"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            call(given)


@pytest.mark.parametrize("item", ["x", None, TopK, int])
def test_only_instances_have_a_spec(item: object) -> None:
    shown = "the class TopK; make one, like TopK(ratio=0.01)" if item is TopK else repr(item)
    message = f"format_spec: expected a compressor or a memory, got {shown}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        format_spec(item)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("residuals", "no memory named 'residuals'; did you mean 'residual'?"),
        ("error_feedback", "no memory named 'error_feedback'; did you mean 'residual'?"),
        ("residual:decay=2", "residual: decay must be in (0, 1], got 2.0"),
        ("residual:decay=0", "residual: decay must be in (0, 1], got 0.0"),
        ("residual:beta=1", "residual: unknown parameter ['beta'], expected ['decay']"),
    ],
)
def test_errors_about_memories(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_memory(spec)


def test_errors_about_exchanges() -> None:
    message = "no exchange named 'gathers'; did you mean 'gather'?"
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_exchange("gathers")


@pytest.mark.parametrize(
    "spec",
    [
        "mean",
        "gather",
        "sharded",
        "leader",
        "gather:aggregate=median",
        "gather:aggregate=mean",
        "hierarchical:node=2,between=auto",
        "hierarchical:node=8,between=sharded",
        "hierarchical:node=2,between=gather:aggregate=trimmed",
    ],
)
def test_exchanges_read_and_format_back(spec: str) -> None:
    config = parse_exchange(spec)
    assert str(config) == spec
    assert exchange_of(spec) == config
    assert exchange_of(config) is config


def test_every_exchange_of_the_folder_reads_back() -> None:
    for name, cls in exchange_classes().items():
        for example in cls.examples:
            settings = ",".join(f"{key}={value}" for key, value in example.items())
            spec = f"{name}:{settings}" if settings else name
            assert str(parse_exchange(spec)) == spec


def test_an_exchange_is_parsed_into_its_parts() -> None:
    assert parse_exchange(" gather : aggregate = median ") == ExchangeConfig(
        "gather", (("aggregate", "median"),)
    )
    assert parse_exchange("hierarchical:node=4") == ExchangeConfig("hierarchical", (), 4)
    assert parse_exchange("hierarchical:between=sharded,node=4") == ExchangeConfig(
        "hierarchical", (), 4, ExchangeConfig("sharded")
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gathr", "no exchange named 'gathr'; did you mean 'gather'?"),
        ("", f"no exchange named ''; there are {', '.join(exchange_classes())}"),
        (
            "gather:agregate=median",
            "gather: unknown parameter ['agregate'], expected ['aggregate', 'faulty', 'mix']",
        ),
        ("mean:aggregate=median", "mean: unknown parameter ['aggregate'], expected []"),
        # The compressor is a field of the class, but no parameter of the spec.
        (
            "gather:codec=topk",
            "gather: unknown parameter ['codec'], expected ['aggregate', 'faulty', 'mix']",
        ),
        (
            "gather:aggregate=medain",
            f"gather: aggregate must be one of {[*get_args(Aggregation)]}, got 'medain'",
        ),
        ("gather:", "gather: nothing after the colon in 'gather:'"),
        ("hierarchical", "hierarchical: missing parameter ['node'], as in 'hierarchical:node=8'"),
        ("allreduce", "no exchange named 'allreduce'; did you mean 'mean'?"),
        ("all_reduce", "no exchange named 'all_reduce'; did you mean 'mean'?"),
        ("AllGather", "no exchange named 'AllGather'; did you mean 'gather'?"),
        (
            "hierarchical:node=2,between=allreduce",
            "no exchange named 'allreduce'; did you mean 'mean'?",
        ),
        ("hierarchical:node=0", "hierarchical: node must be at least 1, got 0"),
        (
            "hierarchical:node=2,inside=mean",
            "hierarchical: unknown parameter ['inside'], expected ['between', 'node']",
        ),
        (
            "hierarchical:node=2,between=gathr",
            "no exchange named 'gathr'; did you mean 'gather'?",
        ),
        (
            "hierarchical:node=2,between=sharded:aggregate=median",
            "sharded: unknown parameter ['aggregate'], expected []",
        ),
        (
            "hierarchical:node=2,between=hierarchical",
            "hierarchical: between must have one level, got 'hierarchical'",
        ),
    ],
)
def test_wrong_exchanges_are_refused_by_name(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_exchange(spec)


@pytest.mark.parametrize(
    ("spec", "dense"),
    [
        ("mean", "mean"),
        ("gather", "mean"),
        ("sharded", "mean"),
        ("leader", "mean"),
        # Robust aggregations need all gradients, also when they are sent as they are.
        ("gather:aggregate=median", "gather:aggregate=median"),
        ("hierarchical:node=2", "hierarchical:node=2,between=mean"),
        ("hierarchical:node=2,between=sharded", "hierarchical:node=2,between=mean"),
        (
            "hierarchical:node=2,between=gather:aggregate=median",
            "hierarchical:node=2,between=gather:aggregate=median",
        ),
    ],
)
def test_the_dense_form_of_an_exchange(spec: str, dense: str) -> None:
    assert str(parse_exchange(spec).dense()) == dense


@pytest.mark.parametrize(
    ("spec", "across"),
    [
        ("gather:aggregate=median", "gather:aggregate=median"),
        ("hierarchical:node=2", "auto"),
        ("hierarchical:node=2,between=sharded", "sharded"),
        ("hierarchical:node=2,between=gather:aggregate=median", "gather:aggregate=median"),
    ],
)
def test_the_exchange_across_nodes(spec: str, across: str) -> None:
    config = parse_exchange(spec)
    assert str(config.across_nodes) == across
    assert config.aggregate == ("median" if "median" in spec else "mean")


@pytest.mark.parametrize(
    ("spec", "ranks", "expected"),
    [
        ("mean", 8, 0),
        ("gather", 8, 0),
        ("gather:aggregate=majority", 8, 0),
        ("gather:aggregate=median", 1, 0),
        ("gather:aggregate=median", 8, 3),
        ("gather:aggregate=trimmed", 8, 2),
        ("gather:aggregate=diameter", 5, 1),
        # Four nodes of two: a node with a faulty rank is lost as a whole.
        ("hierarchical:node=2,between=gather:aggregate=median", 8, 1),
        ("hierarchical:node=8,between=gather:aggregate=median", 8, 0),
        ("hierarchical:node=2,between=gather", 8, 0),
        ("hierarchical:node=2", 8, 0),
    ],
)
def test_tolerated_faulty_ranks(spec: str, ranks: int, expected: int) -> None:
    assert parse_exchange(spec).tolerated(ranks) == expected


def test_an_exchange_wraps_a_compressor() -> None:
    topk, powersgd = TopK(ratio=0.1), PowerSGD()
    assert parse_exchange("gather").wrap(topk) == GatherExchange(topk)
    assert parse_exchange("gather:aggregate=median").wrap(topk) == GatherExchange(topk, "median")
    # A compressor of several rounds is an aggregator itself.
    assert parse_exchange("mean").wrap(powersgd) is powersgd
    two_levels = parse_exchange("hierarchical:node=2,between=gather")
    assert two_levels.wrap(topk) == HierarchicalExchange(GatherExchange(topk), 2)
    two_levels = parse_exchange("hierarchical:node=2,between=mean")
    assert two_levels.wrap(powersgd) == HierarchicalExchange(powersgd, 2)


def test_the_catalogue_is_the_folder() -> None:
    assert {"bf16", "efsign", "fp16", "none", "powersgd", "qsgd", "randomk", "topk"} <= set(
        gradwire.methods()
    )
    assert gradwire.methods() == sorted(compressor_classes())
    assert {"none", "residual"} <= set(memory_classes())
    assert {"gather", "mean", "sharded"} <= set(exchange_classes())


def test_a_method_has_examples_and_a_paper() -> None:
    for cls in compressor_classes().values():
        assert cls.examples
        assert cls.paper


def test_classes_are_attributes_of_the_package() -> None:
    assert gradwire.TopK is TopK
    assert gradwire.parse("topk:ratio=0.5") == gradwire.TopK(ratio=0.5)
    assert {cls.__name__ for cls in compressor_classes().values()} >= {"QSGD", "PowerSGD", "EFSign"}


@pytest.mark.parametrize("name", ["TopQ", "topk_", "Sparsifier"])
def test_other_attributes_do_not_exist(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'gradwire' has no attribute '{name}'"):
        getattr(gradwire, name)


@pytest.mark.parametrize(
    ("name", "meant"), [("Topk", "TopK"), ("topk", "TopK"), ("Attach", "attach")]
)
def test_a_wrong_attribute_gives_a_hint(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{meant}'\\?$"):
        getattr(gradwire, name)


def test_dir_lists_all_public_names() -> None:
    names = dir(gradwire)
    assert {*gradwire.__all__, "TopK", "PowerSGD", "__version__"} <= set(names)
    assert all(getattr(gradwire, name) is not None for name in names if not name.startswith("_"))


def test_public_names_exist() -> None:
    assert all(getattr(gradwire, name) is not None for name in gradwire.__all__)
