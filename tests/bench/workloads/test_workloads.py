"""Every workload in the folder, in its tiny form."""

from pathlib import Path

import pytest
import torch

from gradwire.bench.datasets.sampling import batch_slice, random_integers, random_permutation
from gradwire.bench.report import workload_table
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads.base import (
    Workload,
    evaluating,
    parameter_count,
    parse_workload,
    update,
    workload_classes,
)
from gradwire.errors import ConfigError

SIZES = {
    "charlm": 1_102_977,
    "gpt": 10_820_449,
    "gpt2": 124_082_688,
    "lstm_ptb": 66_034_000,
    "lstm_wikitext2": 50_065_078,
    "mlp": 5_824_522,
    "neumf": 1_978_305,
    "resnet101": 42_512_970,
    "resnet18": 11_173_962,
    "resnet20": 269_722,
    "resnet9": 6_573_120,
    "unet": 1_942_289,
    "vgg16": 14_728_266,
}
NO_DATA = {"charlm", "gpt", "gpt2", "mlp"}


@pytest.fixture(params=sorted(workload_classes()))
def workload(request: pytest.FixtureRequest) -> Workload:
    return parse_workload(f"{request.param}-tiny")


def test_models_are_equal_from_equal_seeds(workload: Workload) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(workload.build())
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_is_the_same_in_every_run_and_another_on_every_rank(workload: Workload) -> None:
    state = torch.get_rng_state()
    inputs, targets = workload.batch(step=2, rank=1, workers=4, seed=0)
    again = workload.batch(step=2, rank=1, workers=4, seed=0)
    assert len(inputs) == len(targets) == workload.batch_size
    assert torch.equal(inputs, again.inputs)
    assert torch.equal(targets, again.targets)
    assert not torch.equal(inputs, workload.batch(step=2, rank=0, workers=4, seed=0).inputs)
    assert not torch.equal(inputs, workload.batch(step=2, rank=1, workers=4, seed=1).inputs)
    assert torch.equal(state, torch.get_rng_state())


def test_some_steps_make_the_loss_smaller(workload: Workload) -> None:
    torch.manual_seed(0)
    model = workload.build()
    optimiser = workload.optimiser(model)
    inputs, targets = workload.batch(step=0, rank=0, workers=1, seed=0)
    losses = []
    for step in range(30):
        optimiser.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        update(workload, model, optimiser, step, 30)
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    # Learning the frequencies alone, without the inputs, is not enough.
    with evaluating(model):
        right, wrong = (workload.loss(model(x), targets) for x in (inputs, inputs.roll(1, 0)))
    assert right < 0.9 * wrong


def test_an_evaluation_leaves_model_and_generator_as_they_were(workload: Workload) -> None:
    model = workload.build()
    generator = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = workload.evaluate(model)
    assert first == workload.evaluate(model)
    assert first.metric_name == workload.metric.name
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("name", sorted(workload_classes().keys() - NO_DATA))
def test_a_workload_without_its_data_names_the_download_address(name: str) -> None:
    workload = parse_workload(name)
    assert workload.source is not None
    with pytest.raises(ConfigError) as caught:
        workload.batch(step=0, rank=0, workers=1, seed=0)
    error = str(caught.value)
    assert error.startswith(f"{workload.source.name}: name its folder with --data DIR")
    assert workload.source.home in error


@pytest.mark.parametrize("name", sorted(NO_DATA))
def test_some_workloads_need_no_data(name: str) -> None:
    inputs, _ = parse_workload(name).batch(step=0, rank=0, workers=1, seed=0)
    assert len(inputs) == parse_workload(name).batch_size


def test_sizes_are_those_in_the_docs() -> None:
    assert {row.name: row.parameters for row in workload_table.rows()} == SIZES
    for name in ("charlm", "mlp", "neumf", "resnet20"):
        assert parameter_count(parse_workload(name).build()) == SIZES[name]


def test_learning_stays_possible_throughout_a_run() -> None:
    for name in workload_classes():
        workload = parse_workload(name)
        rates = [workload.learning_rate_at((step + 0.5) / 50) for step in range(50)]
        groups = workload.optimiser(torch.nn.Linear(2, 2)).param_groups
        assert min(rates) > 0
        # The highest is about the one that the optimiser has without a schedule.
        assert all(0.85 * group["lr"] <= max(rates) <= group["lr"] for group in groups)


def test_schedules_have_their_shapes() -> None:
    assert [schedules.triangle(at, 0.5) for at in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 0.5, 0]
    assert [schedules.cosine(at, 0.5) for at in (0, 0.25, 0.5, 1)] == [0, 0.5, 1, 0]
    assert schedules.cosine(0.75, 0.5) == pytest.approx(0.5)
    stairs = [schedules.stairs(at, 0.1, 0.5, 0.75) for at in (0.05, 0.2, 0.5, 0.8)]
    assert stairs == pytest.approx([0.5, 1, 0.1, 0.01])
    assert [schedules.plateau(at, 0.5) for at in (0, 0.5, 0.75, 1)] == [1, 1, 0.5, 0]


def test_an_epoch_assigns_every_batch_once_before_the_next_begins() -> None:
    slices = [batch_slice(67, 8, step, rank, 3) for step in range(6) for rank in range(3)]
    assert [start for epoch, start, _ in slices if epoch == 0] == list(range(0, 64, 8))
    assert [start for epoch, start, _ in slices if epoch == 1] == list(range(0, 64, 8))
    assert all(stop - start == 8 for _, start, stop in slices)
    with pytest.raises(
        ConfigError, match="batch_size must be at most 7, the number of examples, got 8"
    ):
        batch_slice(7, 8, 0, 0, 1)


def test_random_numbers_are_uniform_and_keyed() -> None:
    assert random_permutation(100, "cpu", 1).sort().values.tolist() == list(range(100))
    assert not torch.equal(random_permutation(100, "cpu", 1), random_permutation(100, "cpu", 2))
    counts = random_integers(5, 10_000, "cpu", 3).bincount(minlength=5)
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize(("more", "norm"), [("", 0.25), (",clip_norm=0.5", 0.5)])
def test_the_norm_of_gradients_is_limited_if_the_workload_clips(more: str, norm: float) -> None:
    workload = parse_workload(f"lstm_ptb-tiny:learning_rate=1{more}")
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, 100.0)
    update(workload, model, workload.optimiser(model), 0, 50)
    assert (model.weight - before).norm().item() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("mpl", None, "no workload named 'mpl'; did you mean 'mlp'?"),
        ("mlp:batch_size=0", None, "mlp: batch_size must be at least 1, got 0"),
        ("mlp:hidden=0", None, "mlp: hidden must be at least 1, got 0"),
        ("mlp:classes=-1", None, "mlp: classes must be at least 1, got -1"),
        ("gpt-tiny:layers=-1", None, "gpt: layers must be at least 1, got -1"),
        ("gpt-tiny:dropout=2", None, "gpt: dropout must be in [0, 1), got 2.0"),
        ("resnet9:learning_rate=nan", None, "resnet9: learning_rate must be finite, got nan"),
        ("vgg16:weight_decay=-1", None, "vgg16: weight_decay must not be negative, got -1.0"),
        ("gpt-tiny:clip_norm=0", None, "gpt: clip_norm must be positive, got 0"),
        ("mlp:batch", None, "mlp: expected key=value, got 'batch' in 'mlp:batch'"),
        ("mlp", "here", "mlp: generates its data, so it takes no data folder"),
        ("mlp:device=cuda", None, "mlp: unknown parameter ['device'], expected ['batch_size', "),
        ("resnet9-tiny", "here", "resnet9: synthetic data and the folder here: choose one"),
        ("charlm:depth=2", None, "charlm: unknown parameter ['depth'], expected ['batch_size', "),
    ],
)
def test_a_mistake_is_named(text: str, data: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_workload(text, None if data is None else Path(data))
    assert str(caught.value).startswith(message)
