from pathlib import Path

from scripted_cluster import evaluated, finished

from gradwire.bench.runs.progress import TensorBoardWriter
from gradwire.bench.worker.protocol import Evaluated, Failed, Started, Tick


class FakeWriter:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str]] = []
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str) -> None:
        self.texts.append((tag, text_string))

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


def test_every_run_has_a_folder_and_every_step_its_loss() -> None:
    books: dict[str, FakeWriter] = {}

    def open_writer(folder: Path) -> FakeWriter:
        return books.setdefault(folder.name, FakeWriter())

    board = TensorBoardWriter(Path("runs"), 3, open_writer)
    board.show(Started(case="topk:ratio=0.1 | qsgd:bits=4"))
    board.show(Tick(case="a", step=2, step_ms=5.0))
    seen = evaluated("a", 4, 1.5)
    board.show(Evaluated(**{**vars(seen), "losses": (2.0, 1.9)}))
    board.show(finished("a"))
    board.show(Started(case="efsign"))
    board.show(Failed(case="efsign", error="rank 0: no"))
    board.close()
    assert list(books) == ["topk_ratio=0.1_qsgd_bits=4,_seed_3", "efsign,_seed_3"]
    first, second = books.values()
    assert [entry for entry in first.scalars if entry[0] == "train/loss"] == [
        ("train/loss", 2.0, 3),
        ("train/loss", 1.9, 4),
    ]
    assert {("held-out/loss", 1.5, 4), ("held-out/accuracy", 0.5, 4), ("step_ms", 5.0, 2)} <= set(
        first.scalars
    )
    assert second.texts == [("failed", "rank 0: no")]
    assert first.closed
    assert second.closed
