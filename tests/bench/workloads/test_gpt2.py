"""GPT-2: its exact sizes, what initial weights and the tied output give, and tokens of a text."""

import bz2
import math
from pathlib import Path

import pytest
import torch

from gradwire.bench.workloads.base import parameter_count, parse_workload
from gradwire.errors import ConfigError

SIZES = {"124": 124_082_688, "60": 60_695_040, "30": 30_160_896}


@pytest.mark.parametrize("size", SIZES)
def test_the_sizes_of_the_docstring_are_exact(size: str) -> None:
    with torch.device("meta"):
        model = parse_workload(f"gpt2:size={size}").build()
    assert parameter_count(model) == SIZES[size]
    docs = parse_workload("gpt2").__doc__ or ""
    assert f"| {size} | " in docs
    assert f" | {SIZES[size]:,} |" in docs


def test_a_new_model_predicts_all_tokens_alike() -> None:
    workload = parse_workload("gpt2-tiny:vocabulary=500")
    torch.manual_seed(0)
    loss = workload.evaluate(workload.build()).loss
    assert loss == pytest.approx(math.log(512), rel=0.01)


def test_a_prediction_depends_on_earlier_tokens_only() -> None:
    workload = parse_workload("gpt2-tiny")
    model = workload.build().eval()
    inputs, _ = workload.batch(step=0, rank=0, workers=1, seed=0)
    changed = inputs.clone()
    changed[:, 8:] = 0
    first, second = model(inputs), model(changed)
    assert torch.equal(first[:, :8], second[:, :8])
    assert not torch.equal(first[:, 8:], second[:, 8:])


def test_autocast_keeps_float32_gradients() -> None:
    workload = parse_workload("gpt2-tiny:bf16=true")
    torch.manual_seed(0)
    model = workload.build()
    inputs, targets = workload.batch(step=0, rank=0, workers=1, seed=0)
    output = model(inputs)
    workload.loss(output, targets).backward()
    assert output.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    torch.manual_seed(0)
    exact = parse_workload("gpt2-tiny").build()(inputs)
    assert not torch.equal(output, exact)
    torch.testing.assert_close(output, exact, rtol=0.05, atol=0.01)


def test_matrices_decay_and_vectors_do_not() -> None:
    workload = parse_workload("gpt2-tiny")
    model = workload.build()
    decayed, constant = workload.optimiser(model).param_groups
    assert decayed["weight_decay"] > 0 == constant["weight_decay"]
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in constant["params"]} == {1}
    assert len(decayed["params"]) + len(constant["params"]) == len([*model.parameters()])


def test_a_text_is_read_as_tokens(tmp_path: Path) -> None:
    corpus = tmp_path / "gutenberg"
    corpus.mkdir()
    lines = "".join(f"The cat number {i} sat on the mat.\n" for i in range(200))
    (corpus / "train_1.txt.bz2").write_bytes(bz2.compress(lines.encode()))
    (corpus / "valid.txt").write_text(lines[:3000])
    spec = f"gpt2:size=tiny,context=16,vocabulary=300,cache={tmp_path / 'cache'}"
    workload = parse_workload(spec, tmp_path)
    assert workload.heading == "GPT-2 (tiny) on BPE tokens"
    inputs, targets = workload.batch(step=0, rank=0, workers=1, seed=0)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert workload.examples() > 10
    evaluation = workload.evaluate(workload.build())
    assert evaluation.metric == pytest.approx(math.exp(evaluation.loss))
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_random_tokens_have_no_cache() -> None:
    with pytest.raises(ConfigError, match="gpt2: cache is for tokens of a data folder, got 'here'"):
        parse_workload("gpt2-tiny:cache=here").examples()
