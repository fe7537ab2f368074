"""Studies that repeat the tables of papers: GRACE, GraVAC, CSER, Qsparse, error feedback.

Networks are narrower and runs shorter than in the papers, so that a model takes minutes of a GPU.
"""

from collections.abc import Mapping

from gradwire.bench.studies.cases import (
    DENSE,
    FEEDBACK,
    WITH_AND_WITHOUT,
    cser,
    gravac_table,
    qsparse,
)
from gradwire.bench.studies.grace import (
    DGC_OF_IMAGES,
    DGC_OF_TEXT,
    GRACE_METHODS,
    NEWER,
    WITHOUT_FEEDBACK,
)
from gradwire.bench.studies.study import Study

_RESNET = "resnet9:bf16=true"
_EPOCH = 97
"""Steps of one epoch of CIFAR-10 with 8 workers and batches of 64 images."""

_SMALL_BATCH_EPOCH = 195
"""Steps of one epoch with 8 workers and batches of 32 images."""

_NARROW_NET = "bf16=true,flat=true,width=32,batch_size=32"
_PTB_EPOCH = 332
"""Steps of one epoch of Penn Treebank with 4 workers."""

GRACE_TASKS = (
    "grace-neumf",
    "grace-unet",
    "grace-lstm",
    "grace-resnet20",
    "grace-resnet9",
    "grace-vgg16",
)
"""The studies of the GRACE matrix, cheapest first."""

GRAVAC_TABLES = ("gravac-resnet101", "gravac-vgg16", "gravac-ptb")
"""The studies of GraVAC's own models."""


def _grace(
    task: str, workload: str, steps: int, own: tuple[str, ...] = (), target: str | None = None
) -> Study:
    """Returns the matrix of GRACE on one of its tasks, with cases of its `own`."""
    return Study(
        f"GRACE's sixteen methods by its names, and five newer ones, on {task}",
        workload,
        steps,
        (*DENSE, *dict.fromkeys((*GRACE_METHODS.values(), *NEWER, *WITHOUT_FEEDBACK)), *own),
        seeds=(0, 1, 2),
        target=target,
        rates=("25gbit", "10gbit", "1gbit"),
    )


def _gravac(model: str, workload: str, steps: int, workers: int = 8) -> Study:
    """Returns GraVAC's table on one of its models, with windows of a tenth of the run."""
    return Study(
        f"GraVAC with four sparsifiers, its ends, and Accordion, on {model}",
        workload,
        steps,
        (*DENSE, *gravac_table(steps // 10)),
        workers=workers,
        evaluations=20,
        rates=("1gbit",),
    )


_DGC_IMAGES, _DGC_TEXT = (DGC_OF_IMAGES,), (DGC_OF_TEXT,)

PAPER_TABLES: Mapping[str, Study] = {
    "grace-resnet20": _grace("ResNet-20", "resnet20:bf16=true", 12 * _EPOCH, _DGC_IMAGES),
    "grace-vgg16": _grace("VGG-16", "vgg16:bf16=true", 12 * _EPOCH, _DGC_IMAGES),
    "grace-resnet9": _grace("ResNet-9", _RESNET, 12 * _EPOCH, _DGC_IMAGES, "accuracy=0.9"),
    "grace-lstm": _grace("the LSTM on Penn Treebank", "lstm_ptb:hidden=650", 5 * 166, _DGC_TEXT),
    "grace-neumf": _grace("NeuMF on MovieLens", "neumf", 1000),
    "grace-unet": _grace("U-Net on DAGM", "unet", 1000),
    "gravac-resnet101": _gravac(
        "ResNet-101 with a quarter of its width",
        "resnet101:bf16=true,flat=true,width=16,batch_size=32,learning_rate=0.05",
        8 * _SMALL_BATCH_EPOCH,
    ),
    "gravac-vgg16": _gravac(
        "VGG-16 with half its width",
        f"vgg16:{_NARROW_NET},learning_rate=0.05",
        8 * _SMALL_BATCH_EPOCH,
    ),
    "gravac-ptb": _gravac(
        "the medium LSTM of Zaremba et al.", "lstm_ptb:hidden=650", 5 * _PTB_EPOCH, workers=4
    ),
    "gravac-32": Study(
        "GraVAC with top-k against the ends of its range, with 32 workers",
        "resnet9:bf16=true,flat=true,width=32,batch_size=16",
        12 * _EPOCH,
        (*DENSE, *gravac_table(12 * _EPOCH // 10, ("topk",))),
        workers=32,
        target="accuracy=0.88",
        rates=("1gbit",),
    ),
    "cser-cifar100": Study(
        "CSER against error feedback and Qsparse on CIFAR-100, each at its best learning rate",
        f"resnet9:{_NARROW_NET},images=cifar100",
        8 * _SMALL_BATCH_EPOCH,
        (
            *DENSE,
            *cser(updates=32, errors=4, sync_every=8, qsparse=2),
            *cser(updates=512, errors=16, sync_every=32, qsparse=32),
            *cser(updates=2048, errors=8, sync_every=256, qsparse=128),
        ),
        evaluations=8,
        rates=("1gbit",),
        learning_rates=(0.4, 0.2, 0.1, 0.05),
    ),
    "qsparse-ptb": Study(
        "Qsparse-local-SGD, synchronous and asynchronous, against top-k on Penn Treebank",
        "lstm_ptb:hidden=650",
        5 * _PTB_EPOCH,
        (
            *DENSE,
            "topk:ratio=0.01",
            qsparse(0.01, 4),
            qsparse(0.01, 8),
            qsparse(0.01, 8, "sign"),
            "topk:ratio=0.01 | qsgd:bits=4 @ local=(async_qsparse:sync_every=8,gaps=random)",
        ),
        seeds=(0, 1, 2),
        workers=4,
        evaluations=5,
        rates=("1gbit",),
    ),
    "qsparse-async": Study(
        "asynchronous Qsparse-local-SGD, with syncs at each worker's own times",
        f"resnet9:{_NARROW_NET},learning_rate=0.1",
        8 * _SMALL_BATCH_EPOCH,
        (
            *DENSE,
            *(
                f"topk:ratio=0.01 | qsgd:bits=4 @ local=({local})"
                for gap in (4, 8)
                for local in (
                    f"qsparse:sync_every={gap}",
                    f"async_qsparse:sync_every={gap}",
                    f"async_qsparse:sync_every={gap},gaps=random",
                )
            ),
        ),
        seeds=(0, 1, 2),
        evaluations=8,
        rates=("1gbit",),
    ),
    "error-feedback": Study(
        "effect of error feedback on eight biased methods, compared with GRACE's table",
        _RESNET,
        12 * _EPOCH,
        FEEDBACK,
        seeds=(0, 1, 2),
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "error-feedback-long": Study(
        "error feedback in a run much longer than the delay of an entry in the residual",
        f"resnet9:{_NARROW_NET},learning_rate=0.2",
        5200,
        WITH_AND_WITHOUT,
        target="accuracy=0.9",
        rates=("1gbit",),
    ),
    "error-feedback-rates": Study(
        "random-k and top-k with and without a residual, over learning rates",
        f"resnet9:{_NARROW_NET}",
        8 * _SMALL_BATCH_EPOCH,
        WITH_AND_WITHOUT,
        seeds=(0, 1, 2),
        evaluations=8,
        rates=("1gbit",),
        learning_rates=(0.8, 0.2, 0.05, 0.0125),
    ),
}
