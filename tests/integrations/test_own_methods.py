"""Methods outside the package: ranks must have the same ones, with the same fields and code."""

import own_method_jobs as jobs
import pytest
import torch

from processes import Ranks


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("ratio", "compressor.ratio: 0.1 on rank [0]; 0.2 on rank [1]"),
        ("decay", "memory.decay: 0.9 on rank [0]; 0.8 on rank [1]"),
        ("last", "controller.last: 0.1 on rank [0]; 0.2 on rank [1]"),
        ("class", 'compressor.class: "__main__.Mine" on rank [0]; "__main__.Other" on rank [1]'),
        ("catalogue", 'compressor.class: "TopK" on rank [0]; "topk.Mine" on rank [1]'),
        ("switch", 'compressor.class: "__main__.Mine" on rank [0]; "__main__.Other" on rank [1]'),
        ("reducer", 'compressor.class: "__main__.Mine" on rank [0]; "__main__.Other" on rank [1]'),
        ("factor", "code.__main__.Mine: "),
    ],
)
def test_ranks_with_other_own_methods_are_refused(
    two_ranks: Ranks, case: str, difference: str
) -> None:
    first, second = two_ranks.run(jobs.failure_of, case)
    assert first.startswith("ranks are set up differently:\n")
    assert difference in first
    assert second == first


def test_own_methods_of_the_same_script_train(two_ranks: Ranks) -> None:
    (first, spec), (second, _) = two_ranks.run(jobs.trained)
    assert torch.equal(first, second)
    assert spec == '__main__.Mine:ratio=0.1,values="bf16"'
