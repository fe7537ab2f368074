import pytest

import gradwire
from gradwire.bench.cases.baselines import DdpFp32, TorchPowerSgd
from gradwire.bench.cases.parse import MethodCase, parse_case, split_cases
from gradwire.bench.runs import demo, step, train
from gradwire.errors import ConfigError


def test_a_case_is_a_baseline_or_a_spec() -> None:
    assert parse_case("ddp-fp32") == DdpFp32()
    assert parse_case("torch-powersgd:rank=2") == TorchPowerSgd(rank=2)
    assert parse_case("topk:ratio=0.01") == MethodCase("topk:ratio=0.01")


def test_only_torchs_powersgd_needs_one_bucket() -> None:
    names = ("ddp-fp32", "torch-fp16", "torch-powersgd:rank=1", "powersgd:rank=1")
    assert [parse_case(name).one_bucket for name in names] == [False, False, True, False]


def test_all_cases_with_communication_learn() -> None:
    names = ("compute-only", "ddp-fp32", "torch-bf16", "efsign")
    assert [parse_case(name).learns for name in names] == [False, True, True, True]


@pytest.mark.parametrize(
    ("texts", "cases"),
    [
        (["none,efsign"], ("none", "efsign")),
        (["none", "efsign, fp16"], ("none", "efsign", "fp16")),
        (["topk:ratio=0.01 | qsgd:bits=4,none"], ("topk:ratio=0.01 | qsgd:bits=4", "none")),
        (
            ["none,efsign @ exchange=gather, memory=none"],
            ("none", "efsign @ exchange=gather,memory=none"),
        ),
        (["none,powersgd:rank=1,seed=2"], None),
    ],
)
def test_commas_separate_cases_but_not_settings(
    texts: list[str], cases: tuple[str, ...] | None
) -> None:
    if cases is None:
        with pytest.raises(ConfigError, match=r"^powersgd: unknown parameter \['seed'\]"):
            split_cases(texts)
    else:
        assert split_cases(texts) == cases


def test_the_default_cases_of_the_commands_exist() -> None:
    assert split_cases(demo.CASES) == demo.CASES
    assert split_cases(step.CASES) == step.CASES
    assert split_cases(train.CASES) == train.CASES


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["top_k:ratio=0.01"], "no compressor named 'top_k'; did you mean 'topk'?"),
        (["torch-int8"], "no baseline named 'torch-int8'; there are ddp-fp32, torch-fp16, "),
        (["torch-powersgd"], "torch-powersgd: missing parameter ['rank']"),
        (["torch-powersgd:rank=0"], "torch-powersgd: rank must be at least 1, got 0"),
        (["none,none"], "cases: ['none'] given more than once"),
        ([""], "no compressor named ''"),
        ([], "cases: expected at least one"),
    ],
)
def test_a_mistake_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_cases(texts)
    assert str(caught.value).startswith(message)


def test_settings_of_attach_follow_an_at_sign() -> None:
    text = "topk:ratio=0.01 @ memory=residual:decay=0.9, exchange=sharded, nan_policy=ignore"
    [case] = split_cases([text])
    expected = MethodCase("topk:ratio=0.01", "residual:decay=0.9", "sharded", "ignore")
    assert parse_case(case) == expected
    assert parse_case("topk:ratio=0.01 @ memory=none").memory == "none"


def test_brackets_enclose_nested_settings() -> None:
    one = "topk:ratio=0.1 @ controller=(gravac:low=10,high=1000), memory=residual"
    two = "efsign @ exchange=(hierarchical:node=2,between=gather)"
    assert split_cases([f"{one}, {two},none"]) == (one.replace(", ", ","), two, "none")
    assert parse_case(one) == MethodCase(
        "topk:ratio=0.1", "residual", controller="gravac:low=10,high=1000"
    )
    assert parse_case(two) == MethodCase("efsign", exchange="hierarchical:node=2,between=gather")
    assert parse_case(one).make_controller() == gradwire.GraVAC(low=10, high=1000)
    assert (
        parse_case("topk:ratio=0.1 @ controller=autopilot").make_controller()
        == gradwire.Autopilot()
    )
    assert parse_case("topk:ratio=0.1").make_controller() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:ratio=0.1 @ side=demo", "topk:ratio=0.1: side=demo goes with chunktopk whose chunk"),
        (
            "chunktopk @ side=demo,controller=autopilot",
            "chunktopk: a controller measures gradients, not side=demo",
        ),
        ("efsign @ exchange=mean", "efsign does not go with exchange 'mean'"),
        ("efsign @ color=red", "efsign @ color=red: unknown parameter ['color']"),
        ("efsign @ nan_policy=hope", "efsign @ nan_policy=hope: nan_policy must be one of"),
        (
            "efsign @ least_bytes=few",
            "efsign: least_bytes must be auto or a whole number, got 'few'",
        ),
        ("efsign @ controller=autopilot", "autopilot: efsign has no factor"),
        ("efsign @ controller=otto", "no controller named 'otto'"),
        ("topk:ratio=0.1 @ controller=(gravac:low=9,high=2)", "gravac: factors must be"),
        (
            "none @ controller=(accordion:setting=batch,low=1,high=8)",
            "accordion:setting=batch,low=1,high=8: the benchmarks do not accumulate gradients",
        ),
        ("topk:ratio=0.1 @ controller=(gravac:low=9", "brackets do not match in"),
        ("topk:ratio=0.1 @ memory", "expected key=value, got 'memory' in"),
        ("topk:ratio=0.1 @ memory=none, memory=none", "memory is set twice in"),
    ],
)
def test_settings_that_attach_would_refuse_are_refused_before_workers_start(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        split_cases([text])
    assert str(caught.value).startswith(message)
