"""The language-model studies: GPT-2 on BPE tokens, with the methods meant for slow links."""

from collections.abc import Mapping

from gradwire.bench.studies.cases import DENSE, RAW, by_gravac, cser, qsparse
from gradwire.bench.studies.study import Study
from gradwire.local.sparseloco import SPARSE_2_BITS
from gradwire.optim.demo import MERGE

_GPT30 = "gpt2:size=30,bf16=true"

_STEPS = 3000
"""49 million tokens of 4 workers with batches of 8 windows of 512."""

_GAP = 30
"""Steps between syncs: a hundred syncs in a run."""

SPARSELOCO = (
    f"{SPARSE_2_BITS} @ local=(sparseloco:sync_every={_GAP}),"
    "exchange=(gather:aggregate=median_norm)"
)

DEMO = f"chunktopk:k=32,chunk=4096 @ side=demo,memory=(residual:decay=0.999),exchange=({MERGE})"

CASES = (
    *DENSE,
    "powersgd:rank=4",
    "topk:ratio=0.01",
    "topk:ratio=0.01 @ side=update,beta1=0.5",
    "int4",
    "efsign",
    f"none @ local=(diloco:sync_every={_GAP})",
    f"fp4 @ local=(diloco:sync_every={_GAP},fragments=3,delay=2)",
    SPARSELOCO,
    f"none @ local=(muloco:sync_every={_GAP})",
    f"codebook:bits=2 @ local=(muloco:sync_every={_GAP})",
    DEMO,
    qsparse(0.01, 8),
    *cser(updates=64, errors=4, sync_every=16, qsparse=4)[:1],
    by_gravac("topk", 0.25, RAW, window=100),
    "auto",
)

LANGUAGE: Mapping[str, Study] = {
    "gpt": Study(
        "validation loss of a GPT of 30 million at equal tokens, and its time on slow links",
        _GPT30,
        _STEPS,
        CASES,
        seeds=(0, 1, 2),
        workers=4,
        by_case=True,
    ),
    "gpt-rates": Study(
        "the learning rate of every case of gpt, from a quarter of its tokens",
        _GPT30,
        _STEPS // 4,
        CASES,
        workers=4,
        evaluations=3,
        rates=("1gbit",),
        by_case=True,
        learning_rates=(0.00015, 0.0003, 0.0006, 0.0012, 0.0024),
    ),
}
