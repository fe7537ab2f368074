"""Regression tests for the 28 known defects of an older library of such methods.

One test per defect, in its order, named by the property that must hold. Where a defect of one
method could occur in any method, all methods of the catalogue are tested. Two are tested elsewhere,
because no method is concerned:

- collectives of different buckets that are matched only by chance (24):
  `tests/engine/test_step.py` and `tests/integrations/test_ddp.py` check their order, over threads
  and buckets;
- a host that waits for the GPU in every round of a search (25): here only the number of rounds is
  bounded; the kernel benchmark measures the waits.
"""

import math
import pkgutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base import Compressor, MultiRound, OneRound, TwoLevelExchange
from gradwire.compressors._sparsifier import Sparsifier
from gradwire.compressors.dgc import DGC
from gradwire.compressors.eightbit import EightBit
from gradwire.compressors.inceptionn import Inceptionn
from gradwire.compressors.onebit import OneBit
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.threshold import Threshold
from gradwire.engine.legality import check_exchange
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError, MissingExtra
from gradwire.kernels.reference.thresholds import LOWERINGS
from gradwire.memory.momentum import MomentumCorrection
from gradwire.spec import (
    compressor_classes,
    exchange_classes,
    find_exchange,
    format_spec,
    memory_classes,
    parse_memory,
)
from gradwire.types import EFInput, EncodeContext
from lockstep import Lockstep, noise

METHODS = [cls(**example) for cls in compressor_classes().values() for example in cls.examples]
every_method = pytest.mark.parametrize("method", METHODS, ids=format_spec)
VARYING = [method for method in METHODS if method.traits().variable_length]


def lanes(method: Compressor, numel: int, size: int, exchange: str = "auto") -> Lockstep:
    """Returns ranks with the method's default memory and, unless given, its default exchange."""
    plan = make_plan(method, None, exchange, [torch.zeros(1, max(1, numel))], size)
    return Lockstep(format_spec(method), format_spec(plan.memory), plan.exchange, numel, size)


def roundtrip(method: Compressor, x: Tensor, ctx: EncodeContext | None = None) -> Tensor:
    return method.decode(method.encode(x, ctx))


def relative_error(x: Tensor, out: Tensor) -> float:
    return float((x - out).double().norm() / x.double().norm())


def test_01_two_sides_decode_to_their_means() -> None:
    x = torch.tensor([-1.0, -3.0, 2.0, 4.0])
    assert roundtrip(OneBit(), x).tolist() == [-2.0, -2.0, 3.0, 3.0]


def test_02_low_rank_factors_are_averaged_and_have_the_rank_asked_for() -> None:
    sim = gradwire.simulate({"w": torch.zeros(60, 50)}, "powersgd:rank=4", workers=2)
    ones = sim.step([{"w": torch.ones(60, 50)}] * 2)["w"]
    torch.testing.assert_close(ones, torch.ones(60, 50))
    out = sim.step([{"w": noise(60, 50)}] * 2)["w"]
    assert torch.linalg.matrix_rank(out) == 4


def test_03_low_rank_factors_start_alike_on_all_ranks_and_stay_warm() -> None:
    sim = gradwire.simulate({"w": torch.zeros(60, 50)}, "powersgd", workers=3)
    m = noise(60, 1) @ noise(1, 50) + 0.1 * noise(60, 50, seed=1)
    errors = []
    for _ in range(4):
        sim.step([{"w": m}] * 3)
        factors = [worker.lanes["w"].aggregator_state["q"] for worker in sim.workers]
        assert all(torch.equal(factor, factors[0]) for factor in factors)
        q = factors[0] / factors[0].norm()
        errors.append(relative_error(m, m @ q @ q.T))
    best = torch.linalg.svdvals(m)[1:].norm() / m.norm()
    assert errors[-1] == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize("method", [m for m in METHODS if m.family == "low rank"], ids=format_spec)
def test_04_low_rank_methods_accept_zeros_scalars_and_no_memory(method: Compressor) -> None:
    for shape in ((6, 5), (7,), (), (0, 3)):
        zeros = torch.zeros(shape)
        assert torch.equal(roundtrip(method, zeros), zeros)
        assert roundtrip(method, zeros + 2).isfinite().all()
    ranks = Lockstep(format_spec(method), "none", "mean", 30, size=2)
    assert torch.equal(ranks.step(torch.zeros(30), torch.zeros(30)), torch.zeros(30))


@pytest.mark.parametrize(("kernel", "most"), [((256, 64, 1, 1), 0.02), ((64, 64, 3, 3), 0.02)])
def test_05_kernels_of_convolutions_are_compressed(kernel: tuple[int, ...], most: float) -> None:
    dense = 4 * torch.Size(kernel).numel()
    assert PowerSGD(rank=1).nbytes(kernel) <= most * dense


def test_06_momentum_is_applied_once_a_step() -> None:
    """Decoding a message, as a residual does, changes no state."""
    sim = gradwire.simulate({"w": torch.zeros(40, 30)}, "signum:beta=0.5", workers=1)
    first, second = noise(40, 30), noise(40, 30, seed=1)
    for grad in (first, second):
        sim.step([{"w": grad}])
    momentum = sim.workers[0].lanes["w"].aggregator_state["momentum"].view(40, 30)
    torch.testing.assert_close(momentum, 0.5 * first + 0.5 * second)
    for method in METHODS:
        if isinstance(method, MultiRound):
            ctx = EncodeContext((40, 30))
            state = method.state(ctx, torch.device("cpu"))
            roundtrip(method, first, ctx)
            again = method.state(ctx, torch.device("cpu"))
            assert all(torch.equal(state[key], again[key]) for key in state)


def test_07_the_first_step_has_the_scale_of_all_others_and_no_rate_is_fixed() -> None:
    ranks = Lockstep("efsign", "residual", "gather", 50, size=2)
    for _ in range(3):
        torch.testing.assert_close(ranks.step(torch.ones(50), torch.ones(50)), torch.ones(50))
    torch.testing.assert_close(ranks.stacked_state("residual"), torch.zeros(2, 50))
    classes = [*compressor_classes().values(), *memory_classes().values()]
    names = {field.name for cls in classes for field in fields(cls)}  # type: ignore[arg-type]
    assert not names & {"lr", "rate", "learning_rate"}


@every_method
def test_08_more_ranks_that_agree_change_nothing(method: Compressor) -> None:
    """The result is a mean over ranks, never a sum, also for votes."""
    x = noise(4096)
    alone = lanes(method, 4096, 1).step(x)
    many = lanes(method, 4096, 3).step(x, x, x)
    # Random methods draw on each rank separately, so only the projection on x stays the same.
    assert 0.6 < float(many @ x) / float(alone @ x) < 1.6


@pytest.mark.parametrize("shift", [-5.0, -2.0, 0.0, 2.0])
def test_09_a_threshold_is_about_magnitudes(shift: float) -> None:
    x = noise(10_000) + shift
    out = roundtrip(Threshold(value=2.0), x)
    assert torch.equal(out != 0, x.abs() > 2.0)


def test_10_no_method_touches_the_global_generator_and_anagrams_draw_apart() -> None:
    before = torch.random.get_rng_state()
    for method in METHODS:
        lanes(method, 600, 2).step(noise(600), noise(600))
    assert torch.equal(torch.random.get_rng_state(), before)
    tensors = {name: torch.zeros(64, 64) for name in ("ab", "ba")}
    sim = gradwire.simulate(tensors, "randomk:ratio=0.1", workers=1)
    out = sim.step([{name: torch.ones(64, 64) for name in tensors}])
    assert not torch.equal(out["ab"], out["ba"])


@pytest.mark.parametrize(
    "cls", [c for c in compressor_classes().values() if issubclass(c, Sparsifier)]
)
@pytest.mark.parametrize("numel", [1, 7, 10_000])
def test_11_no_entry_is_chosen_twice_or_outside(cls: type[Sparsifier], numel: int) -> None:
    for method in [m for m in METHODS if isinstance(m, cls)]:
        index = method.select(EFInput(noise(numel)), EncodeContext((numel,)))
        assert index.numel() == index.unique().numel()
        assert index.numel() == 0 or 0 <= int(index.min()) <= int(index.max()) < numel
    if any(field.name == "ratio" for field in fields(cls)) and not cls.sends_indices:
        index = cls(ratio=1.0).select(EFInput(noise(numel)), EncodeContext((numel,)))
        assert torch.equal(index, torch.arange(numel))


@every_method
@pytest.mark.parametrize("numel", [1, 10])
def test_12_constant_and_one_element_tensors_are_updated(method: Compressor, numel: int) -> None:
    ranks = lanes(method, numel, 1)
    x = torch.full((numel,), 0.75)
    # If entries are drawn at random, one of ten is never drawn in 100 steps with probability 3e-5.
    total = sum(ranks.step(x) for _ in range(100))
    assert total.count_nonzero() == numel
    assert (total > 0).all()


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if {"bucket", "block"} & {f.name for f in fields(m)}],  # type: ignore[arg-type]
    ids=format_spec,
)
def test_13_errors_do_not_grow_with_the_tensor(method: Compressor) -> None:
    errors = [relative_error(noise(n), roundtrip(method, noise(n))) for n in (8192, 500_000)]
    assert errors[1] < 1.1 * errors[0]
    assert torch.equal(roundtrip(method, torch.zeros(300)), torch.zeros(300))


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if isinstance(m, OneRound) and not m.traits().is_vote],
    ids=format_spec,
)
def test_14_shards_of_unequal_size_are_as_good_as_equal_ones(method: Compressor) -> None:
    errors = []
    for numel in (3000, 3001):
        ranks = Lockstep(format_spec(method), "none", "sharded", numel, size=3)
        x = noise(3001)[:numel]
        errors.append(relative_error(x, ranks.step(x, x, x)))
    assert errors[1] == pytest.approx(errors[0], rel=0.25, abs=0.02)


@pytest.mark.parametrize("method", VARYING, ids=format_spec)
def test_15_messages_of_varying_length_need_no_gpu(method: Compressor) -> None:
    ranks = lanes(method, 600, 2)
    assert ranks.step(noise(600), 2 * noise(600)).count_nonzero() > 0


def test_16_clipping_bounds_the_norm() -> None:
    memory = MomentumCorrection(clip=1.0)
    for size in (0.1, 1e3, 1e25):
        state = memory.state(100, torch.device("cpu"))
        ef = memory.before(size * noise(100), state, state)
        assert float(ef.grad.double().norm()) <= 1 + 1e-5


def test_17_all_items_have_names_and_refusals_have_readable_reasons() -> None:
    for name, cls in memory_classes().items():
        assert isinstance(parse_memory(name), cls)
    for name, cls in exchange_classes().items():
        assert find_exchange(name) is cls
        spec = f"{name}:node=2,between=gather" if issubclass(cls, TwoLevelExchange) else name
        refusals = []
        for method in METHODS:
            try:
                check_exchange(method, parse_memory("none"), spec)
            except ConfigError as error:
                refusals.append(str(error))
        assert len(refusals) < len(METHODS), f"no method goes with {name}"
        assert all("does not go with" in reason for reason in refusals)
    for wrong in ("broadcast", "allreduce"):
        with pytest.raises(ConfigError, match="no exchange named"):
            find_exchange(wrong)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("method", VARYING, ids=format_spec)
def test_18_ranks_may_send_messages_of_different_lengths(method: Compressor, size: int) -> None:
    grads = [noise(700, seed=rank) * 10.0 ** (2 - 2 * rank) for rank in range(size)]
    ranks = lanes(method, 700, size)
    lengths = {method.encode(grad).nbytes for grad in grads}
    assert ranks.step(*grads).isfinite().all()
    assert len(lengths) > 1 or method.encode(torch.zeros(700)).nbytes not in lengths


def test_19_small_entries_keep_their_magnitude() -> None:
    x = torch.logspace(math.log10(2.0**-10), math.log10(0.0156), 200)
    out = roundtrip(Inceptionn(), x)
    assert (x - out).abs().max() <= 2.0**-10
    assert (out > x / 2).all()
    assert out.unique().numel() > 10


def test_20_the_largest_entry_is_kept_and_codes_are_the_nearest() -> None:
    x = noise(1024)
    out = roundtrip(EightBit(), x)
    place = x.abs().argmax()
    assert out[place] == x[place]
    assert ((out - x).abs() <= 0.0071 * x.abs().max()).all()
    # Decoding to the lower end of a step would shrink everything.
    assert float(out.abs().sum() / x.abs().sum()) == pytest.approx(1, abs=1e-3)
    assert torch.equal(roundtrip(EightBit(), torch.zeros(9)), torch.zeros(9))


@every_method
def test_21_the_output_has_the_shape_of_the_input(method: Compressor) -> None:
    for shape in ((12, 10), (3, 2, 5), (7,), ()):
        assert roundtrip(method, torch.ones(shape)).shape == shape


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if "bits" in {f.name for f in fields(m)}],  # type: ignore[arg-type]
    ids=format_spec,
)
def test_22_codes_take_the_number_of_bits_in_the_spec(method: Compressor) -> None:
    cls = type(method)
    widest = max(m.bits for m in METHODS if type(m) is cls)
    numel = 1 << 20
    bits = 8 * cls(bits=widest).encode(noise(numel)).nbytes / numel
    assert widest < bits < widest + 0.3


@pytest.mark.parametrize("spec", ["signsgd", "signum"])
def test_23_entries_without_a_gradient_do_not_drift(spec: str) -> None:
    sim = gradwire.simulate({"w": torch.zeros(40, 30)}, spec, workers=2)
    zeros = {"w": torch.zeros(40, 30)}
    assert torch.equal(sim.step([zeros, zeros])["w"], zeros["w"])
    sim = gradwire.simulate({"w": torch.zeros(40, 30)}, spec, workers=2)
    x = noise(40, 30)
    assert torch.equal(sim.step([{"w": x}, {"w": -x}])["w"], zeros["w"])
    total = torch.zeros(40, 30)
    x[0] = 0
    for _ in range(100):
        total += sim.step([{"w": x}, {"w": x}])["w"]
    # A random walk of 100 steps, half of them ties, instead of 100 steps up.
    assert total[0].abs().max() < 50


def test_25_the_search_for_a_threshold_has_few_rounds() -> None:
    """If a sample misleads, a few entries fewer are sent, but at least one."""
    assert LOWERINGS <= 10
    x = torch.full((100_000,), 1e-20)
    x[7] = 1.0
    index = DGC(ratio=0.01).select(EFInput(x), EncodeContext((100_000,)))
    assert 1 <= index.numel() <= 1000
    assert 7 in index.tolist()


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_26_gradients_keep_their_type(method: Compressor, dtype: torch.dtype) -> None:
    ranks = lanes(method, 600, 2)
    out = noise(600).to(dtype)
    assert ranks.step(out, out.clone()).dtype == dtype


def test_27_methods_need_no_optional_package() -> None:
    code = (
        "import sys, gradwire; gradwire.methods(); "
        "print(sorted({'cupy', 'triton', 'matplotlib', 'tensorflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(cls.__module__.startswith("gradwire.") for cls in compressor_classes().values())


@pytest.mark.slow  # needs the packages of all extras
def test_28_every_module_can_be_imported() -> None:
    """Includes benchmarks: none imports a name that does not exist."""
    found = pkgutil.walk_packages(gradwire.__path__, "gradwire.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    assert any(name.startswith("gradwire.bench.") for name in names)
    # Modules that need TensorFlow or torchft are imported by make test-tf and make test-torchft.
    missing = set()
    for name in names:
        try:
            import_module(name)
        except (ModuleNotFoundError, MissingExtra) as error:
            missing.add(error.name)
    assert missing <= {"keras", "tensorflow", "torchft"}
