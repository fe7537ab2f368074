"""The Triton kernels equal the reference, in Triton's interpreter, which needs no GPU."""

import pytest

from processes import Jobs, Ranks

SPARSE = {
    "positions": {
        "widths": 3,
        "indices": 6,
        "fits": 15,
        "does not fit": 36,
        "blocks": 12,
        "entries": 12,
    },
    "selections": {"selections": 14},
    "thresholds": {"thresholds": 16, "stages": 12},
    "messages": {"messages": 15},
    "more messages": {"messages": 15},
    "formats": {"messages": 24, "plain": 14, "elias-fano": 9},
    "large": {"messages": 7},
    "spill buffer": {"searches": 12},
    "casts": {"casts": 20},
}


COMPILED = {
    "topk:ratio=0.01": 19,
    "dgc:ratio=0.01": 8,
    "redsync:ratio=0.01": 8,
    "sidco:ratio=0.01": 11,
    "gaussiank:ratio=0.01": 8,
    "threshold:value=0.01": 4,
    "randomk:ratio=0.01": 4,
    "grbs:ratio=0.01": 4,
    "efsign": 4,
    "onebit": 4,
    "terngrad": 4,
    "signsgd": 2,
    "qsgd:bits=4": 2,
    "natural": 2,
    "int4": 2,
    "fp8": 2,
    "eightbit": 2,
    "powersgd:rank=4": 21,
}
"""Number of kernels of a step with error feedback for tensors of ten sizes, or seven matrices."""

DECODED = {
    "topk:ratio=0.01": 5,
    "redsync:ratio=0.01": 5,
    "threshold:value=2.5": 5,
    "randomk:ratio=0.01": 3,
    "efsign": 2,
    "onebit": 2,
    "terngrad": 2,
    "qsgd:bits=4": 2,
    "natural": 2,
    "fp16": 3,
}
"""Number of kernels that check and decode the messages of eight ranks for tensors of six sizes."""


@pytest.mark.parametrize("part", SPARSE)
def test_sparsifiers(interpreter: Ranks, part: str) -> None:
    assert interpreter.run(Jobs("interpreted_sparse").compare, part) == [SPARSE[part]]


def test_dense_quantisers(interpreter: Ranks) -> None:
    done = {
        "roundings": 103,
        "sides": 22,
        "trits": 22,
        "signs": 11,
        "votes": 11,
        "uniforms": 8,
        "drifts": 12,
    }
    assert interpreter.run(Jobs("interpreted").compare) == [done]


@pytest.mark.parametrize("spec", COMPILED)
def test_few_kernels_are_compiled_and_all_at_the_first_step(interpreter: Ranks, spec: str) -> None:
    [counts] = interpreter.run(Jobs("interpreted_variants").variants, spec)
    assert counts == [COMPILED[spec]] * len(counts)


@pytest.mark.parametrize("spec", DECODED)
def test_decoding_compiles_nothing_for_lengths_and_alignments(
    interpreter: Ranks, spec: str
) -> None:
    """Messages of a threshold differ in length and alignment."""
    [counts] = interpreter.run(Jobs("interpreted_variants").decoded, spec)
    assert counts == [DECODED[spec]] * len(counts)


@pytest.mark.parametrize("spec", COMPILED)
def test_kernels_compile_for_a_gpu_that_is_not_present(compiler: Ranks, spec: str) -> None:
    [names] = compiler.run(Jobs("compiled").compiled, spec)
    assert len(names) > 1


def test_kernels_of_large_tensors_compile(compiler: Ranks) -> None:
    [names] = compiler.run(Jobs("compiled").large, "sidco:ratio=0.01")
    assert names[:4] == [
        "_sample_bound_kernel",
        "_first_pass_kernel",
        "_stage_kernel",
        "_stage_kernel",
    ]


def test_kernels_for_positions_only_compile(compiler: Ranks) -> None:
    [names] = compiler.run(Jobs("compiled").positions)
    assert names.count("_emit_kernel") == 2


def test_drift_kernels_compile(compiler: Ranks) -> None:
    [names] = compiler.run(Jobs("compiled").drifts)
    assert names == ["_drift_kernel"] * 8


def test_low_rank_factors(interpreter: Ranks) -> None:
    done = {"factors": 16, "orthonormal": 7}
    assert interpreter.run(Jobs("interpreted_low_rank").compare) == [done]
