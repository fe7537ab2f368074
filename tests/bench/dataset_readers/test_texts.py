import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.bench.datasets.text import (
    ALPHABET,
    PTB,
    WIKITEXT2,
    Corpus,
    read_library,
    read_shakespeare,
    read_words,
)
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

TRAINING = " the cat sat \n the dog sat \n"
TEST = " the dog \n"


def small(corpus: Corpus) -> Corpus:
    """Returns the corpus with the sizes of the two texts above as the official ones."""
    training, test = corpus.training._replace(words=8), corpus.test._replace(words=3)
    return replace(corpus, training=training, test=test, vocabulary=5)


def test_word_ids_follow_first_appearance_and_lines_end_with_a_word(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt").write_text(TRAINING)
    (tmp_path / "ptb" / "ptb.test.txt").write_text(TEST)
    training, held_out = read_words(small(PTB), tmp_path, "cpu")
    assert training.tolist() == [0, 1, 2, 3, 0, 4, 2, 3]
    assert held_out.tolist() == [0, 4, 3]


@pytest.mark.parametrize("name", ["wiki.{}.tokens", "{}.txt", "{}.txt.xz"])
def test_wikitext_may_have_any_of_its_names(tmp_path: Path, name: str) -> None:
    for part, text in (("train", TRAINING), ("test", TEST)):
        packed = lzma.compress(text.encode()) if name.endswith("xz") else text.encode()
        (tmp_path / name.format(part)).write_bytes(packed)
    assert read_words(small(WIKITEXT2), tmp_path, "cpu").held_out.tolist() == [0, 4, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.txt.xz", None, "no wiki.test.tokens or test.txt or test.txt.xz in "),
        ("train.txt", b" the cat sat \n the", "has 5 words, the official file 8"),
        ("train.txt", b"\xff", "is not UTF-8 text from byte 0"),
        ("train.txt", b"a b c d e f g h", "has 8 different words, the official file 5"),
        ("test.txt", b" the bird \n", "has 'bird', which is not in the training text"),
        ("train.txt.xz", lzma.compress(TRAINING.encode())[:-9], "cannot be unpacked: "),
        ("train.txt.xz", b"text", "cannot be unpacked: "),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    files = {"train": TRAINING.encode(), "test": TEST.encode()}
    for part, text in files.items():
        if part != name.partition(".")[0]:
            (tmp_path / f"{part}.txt").write_bytes(text)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_words(small(WIKITEXT2), tmp_path, "cpu")
    error = str(caught.value)
    assert error.startswith("WikiText-2: ")
    assert name in error
    assert message in error
    assert "from https://huggingface.co/datasets/Salesforce/wikitext" in error


def test_a_workload_takes_the_official_text_only(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text(TRAINING)
    with pytest.raises(ConfigError, match=r"ptb.train.txt has 8 words, the official file 929,589"):
        parse_workload("lstm_ptb", tmp_path).batch(0, 0, 1, 0)


def test_targets_are_the_words_that_follow() -> None:
    workload = parse_workload("lstm_ptb-tiny")
    inputs, targets = workload.batch(step=0, rank=0, workers=1, seed=0)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    distance = (targets - inputs) % 50
    assert distance.min() == 1
    assert distance.max() == 4


def test_the_library_is_numbered_and_its_held_out_part_is_separate() -> None:
    training, held_out = read_library()
    assert 900_000 < len(training) < 2_000_000
    assert 0.04 < len(held_out) / len(training) < 0.06
    assert int(training.max()) <= len(ALPHABET)
    assert "".join(ALPHABET[i] for i in training[:9].tolist()) == "# Author:"


def test_shakespeare_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be, or\nnot to be.")
    training, held_out = read_shakespeare(tmp_path, "cpu", characters=20)
    assert "".join(ALPHABET[i] for i in training.tolist()) == "To be, or\nnot to b"
    assert len(held_out) == 2
    with pytest.raises(ConfigError, match=r"input.txt has 20 characters, the official file 1,115,"):
        parse_workload("gpt", tmp_path).batch(0, 0, 1, 0)
