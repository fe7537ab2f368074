import pytest
import torch

from laconic.bench.workload import Workload, parameter_count, parse_workload, workload_classes
from laconic.bench.workloads.charlm import ALPHABET, CharLm, read_text
from laconic.bench.workloads.mlp import Mlp
from laconic.errors import ConfigError


@pytest.fixture(params=sorted(workload_classes()))
def workload(request: pytest.FixtureRequest) -> Workload:
    return parse_workload(f"{request.param}:hidden=64,batch_size=8")


def test_models_are_equal_from_equal_seeds(workload: Workload) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(workload.build())
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_is_the_same_in_every_run_and_another_on_every_rank(workload: Workload) -> None:
    inputs, targets = workload.batch(step=2, rank=1, workers=4, seed=0)
    again = workload.batch(step=2, rank=1, workers=4, seed=0)
    assert torch.equal(inputs, again.inputs)
    assert torch.equal(targets, again.targets)
    assert not torch.equal(inputs, workload.batch(step=2, rank=0, workers=4, seed=0).inputs)
    assert not torch.equal(inputs, workload.batch(step=2, rank=1, workers=4, seed=1).inputs)


def test_some_steps_make_the_loss_smaller(workload: Workload) -> None:
    torch.manual_seed(0)
    model = workload.build()
    optimiser = workload.optimiser(model)
    inputs, targets = workload.batch(step=0, rank=0, workers=1, seed=0)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_an_evaluation_draws_no_random_numbers(workload: Workload) -> None:
    model = workload.build()
    state = torch.get_rng_state()
    assert workload.evaluate(model) == workload.evaluate(model)
    assert torch.equal(state, torch.get_rng_state())


def test_sizes_are_those_that_the_docs_name() -> None:
    assert parameter_count(Mlp().build()) == 5_824_522
    assert parameter_count(CharLm().build()) == 1_102_977


def test_text_is_numbered_and_its_held_out_part_is_separate() -> None:
    training, held_out = read_text()
    assert 900_000 < len(training) < 2_000_000
    assert 0.04 < len(held_out) / len(training) < 0.06
    assert int(training.max()) <= len(ALPHABET)
    assert "".join(ALPHABET[i] for i in training[:9].tolist()) == "# Author:"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mpl", "no workload named 'mpl'; did you mean 'mlp'?"),
        ("mlp:batch_size=0", "mlp: batch_size must be at least 1, got 0"),
        ("mlp:batch", "mlp: expected key=value, got 'batch' in 'mlp:batch'"),
        ("charlm:depth=2", "charlm: unknown parameter ['depth'], expected ['batch_size', "),
    ],
)
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_workload(text)
    assert str(caught.value).startswith(message)
