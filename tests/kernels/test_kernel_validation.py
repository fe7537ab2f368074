"""Kernel arguments are validated before anything is written; missing compiler caches are errors."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import OneRound, encode_with_feedback
from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import open_lane
from gradwire.engine.step import lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.kernels import validation
from gradwire.kernels.cpu import jit
from gradwire.kernels.cpu.jit import compiled
from gradwire.memory.residual import Residual
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

CPU = torch.device("cpu")
SHARED = torch.zeros(12)


def zeros(numel: int = 8, **kind: object) -> Tensor:
    return torch.zeros(numel, **kind)  # type: ignore[call-overload, no-any-return]


BAD = {
    "grad must be float32, got torch.float64": EFInput(zeros(dtype=torch.float64)),
    "residual must be float32, got torch.float16": EFInput(zeros(), zeros(dtype=torch.float16)),
    "residual_out must be float32, got torch.int64": EFInput(
        zeros(), zeros(), zeros(dtype=torch.int64)
    ),
    "residual must be on cpu as grad, got meta": EFInput(zeros(), zeros(device="meta")),
    "residual_out must be on cpu as grad, got meta": EFInput(
        zeros(), zeros(), zeros(device="meta")
    ),
    r"residual_out must be flat and contiguous, got shape \(8,\) with strides \(2,\)": EFInput(
        zeros(), zeros(), zeros(16)[::2]
    ),
    r"grad must be flat and contiguous, got shape \(2, 4\)": EFInput(zeros().view(2, 4)),
    "residual must have 8 elements as grad has, got 9": EFInput(zeros(), zeros(9), zeros(9)),
    "residual_out must not share memory with grad": EFInput(SHARED[:8], zeros(), SHARED[4:]),
    "residual_out must be the residual itself or share no memory": EFInput(
        zeros(), SHARED[:8], SHARED[4:]
    ),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("spec", ["efsign", "qsgd:bits=4", "topk:ratio=0.5", "fp16"])
def test_encoding_refuses_bad_input(message: str, spec: str) -> None:
    codec = parse(spec)
    assert isinstance(codec, OneRound)
    with pytest.raises(ConfigError, match=f"^kernels: {message}"):
        encode_with_feedback(codec, BAD[message], EncodeContext((8,)))


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("spec", ["powersgd", "acpsgd:rank=2"])
def test_methods_with_several_rounds_refuse_bad_input(message: str, spec: str) -> None:
    codec = parse(spec)
    ctx = EncodeContext((2, 4))
    with pytest.raises(ConfigError, match=f"^kernels: {message}"):
        next(codec.rounds(BAD[message], codec.state(ctx, CPU), ctx))  # type: ignore[attr-defined]


def test_nothing_is_written_before_validation() -> None:
    shared = torch.arange(12.0)
    with pytest.raises(ConfigError, match="share memory"):
        encode_with_feedback(
            parse("efsign"), EFInput(shared[:8], torch.ones(8), shared[4:]), EncodeContext((8,))
        )  # type: ignore[arg-type]
    assert torch.equal(shared, torch.arange(12.0))


def test_the_residual_may_be_renewed_in_place() -> None:
    residual = torch.ones(8)
    validation.check_ef_input(EFInput(zeros(), residual, residual))
    validation.check_ef_input(EFInput(zeros(0), zeros(0), zeros(0)))
    validation.check_ef_input(EFInput(SHARED[:6], None, SHARED[6:]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.5", "powersgd", "acpsgd"])
def test_a_gradient_must_be_floating_point(spec: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"a floating-point tensor is needed, got {dtype}"):
        parse(spec).encode(torch.ones(4, 4, dtype=dtype))


def test_a_sparse_gradient_is_named() -> None:
    sparse = torch.eye(8).to_sparse()
    with pytest.raises(ConfigError, match=r"a dense tensor is needed, got the layout torch.sparse"):
        parse("efsign").encode(sparse)
    lane = open_lane("w", parse("efsign"), Residual(), "gather", EncodeContext((8, 8)), CPU)
    with pytest.raises(ConfigError, match=r"a dense tensor is needed, got the layout torch.sparse"):
        Simulated(1).run([run_rounds([lane_rounds(sparse, lane)])])


@pytest.mark.parametrize(
    "spec",
    [
        "efsign",
        "signsgd",
        "onebit",
        "terngrad",
        "qsgd:bits=4",
        "fp8",
        "topk:ratio=0.5",
        "randomk:ratio=0.5",
        "threshold:value=0.1",
    ],
)
def test_decoding_refuses_a_bad_output(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((8,), step=1)
    assert isinstance(codec, OneRound)
    message = codec.compress(torch.randn(8, generator=torch.Generator().manual_seed(0)), ctx)
    for out, message_of_error in (
        (torch.ones(8, dtype=torch.float64), "out must be float32, got torch.float64"),
        (torch.ones(16)[::2], r"out must be contiguous, got shape \(8,\) with strides \(2,\)"),
    ):
        before = out.clone()
        with pytest.raises(ConfigError, match=f"^kernels: {message_of_error}"):
            codec.decode_add(out, [message], 1.0, ctx)
        assert torch.equal(out, before)


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.3", "powersgd", "qsgd:bits=4"])
def test_a_strided_gradient_is_made_contiguous_by_the_caller(spec: str) -> None:
    """Mean and residual equal those of a contiguous copy, and the mean is written in place."""
    contiguous = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    strided = torch.full((12, 20), 7.0)[:, ::2].T
    strided.copy_(contiguous)
    assert not strided.is_contiguous()
    lanes = []
    for grad in (contiguous, strided):
        lane = open_lane("w", parse(spec), Residual(), "gather", EncodeContext((10, 12)), CPU)
        Simulated(1).run([run_rounds([lane_rounds(grad, lane)])])
        lanes.append(lane)
    assert torch.equal(strided, contiguous)
    assert torch.equal(lanes[0].memory_state["residual"], lanes[1].memory_state["residual"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.3", "powersgd", "qsgd:bits=4"])
def test_a_gradient_of_another_type_is_taken_as_its_float32(spec: str, dtype: torch.dtype) -> None:
    other = torch.randn(10, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    contiguous, residuals = other.float(), []
    for grad in (other, contiguous):
        lane = open_lane("w", parse(spec), Residual(), "gather", EncodeContext((10, 12)), CPU)
        Simulated(1).run([run_rounds([lane_rounds(grad, lane)])])
        residuals.append(lane.memory_state["residual"])
    assert torch.equal(residuals[0], residuals[1])
    assert torch.equal(other, contiguous.to(dtype))


def test_a_gpu_that_is_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.kernels.cuda.device_check import check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
    with pytest.raises(
        ConfigError, match=r"compute capability 7\.0, but cuda:0 \(Tesla P40\) has 6\.1.*reference"
    ):
        check_device(torch.device("cuda", 0))


def test_a_gpu_is_checked_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
    with pytest.raises(ConfigError, match="Tesla P40"):
        kernels.on(torch.device("cuda", 3))


def test_triton_without_a_folder_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gradwire.kernels.cuda.device_check import check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set TRITON_CACHE_DIR to a writable directory"):
        check_device(torch.device("cuda", 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    with caplog.at_level(logging.WARNING, "gradwire.kernels"):
        check_device(torch.device("cuda", 0))
        check_device(torch.device("cuda", 0))
        assert [r.message.startswith("gradwire: compiling kernels") for r in caplog.records] == [
            True
        ]
        # A GPU of another capability needs its own code.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        check_device(torch.device("cuda", 0))
    assert len(caplog.records) == 2


def test_numba_without_a_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    with pytest.raises(ConfigError, match="set NUMBA_CACHE_DIR to one that can be written"):
        compiled(twice)


def twice(x: float) -> float:
    # Calls functions of Numba's own, whose compilation is not logged.
    return 2 * float(np.sum(np.full(1, x)))


def thrice(x: float) -> float:
    return 3 * x


def test_compilation_is_logged_once_but_loading_from_the_cache_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logs a warning: lower levels are not shown unless logging is set up."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit._listener, "_announced", False)
    with caplog.at_level(logging.WARNING, "gradwire.kernels"):
        assert compiled(twice)(1.5) == 3.0
        assert compiled(thrice)(1.5) == 4.5
    [record] = caplog.records
    assert record.message.startswith("gradwire: compiling kernels for this CPU at their first use")
    caplog.clear()
    monkeypatch.setattr(jit._listener, "_announced", False)
    # As in a new process: nothing is loaded yet, but the code is on disk.
    assert compiled(twice)(2.5) == 5.0
    assert not caplog.records


def test_compilation_is_not_logged_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit._listener, "_announced", False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    with caplog.at_level(logging.WARNING, "gradwire.kernels"):
        assert compiled(twice)(1.5) == 3.0
    assert not caplog.records
