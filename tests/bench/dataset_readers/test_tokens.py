"""BPE tokens of a corpus, and the files in which they are cached."""

import bz2
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from gradwire.bench.datasets import tokens
from gradwire.bench.datasets.tokens import encode_lines, read_tokens, train_tokeniser
from gradwire.errors import ConfigError, MissingExtra

LINES = [f"The naïve cat number {i} sat on the mat.\n" for i in range(300)]
VOCABULARY = 400


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replaces the user's cache directory, and forgets what earlier tests have read."""
    read_tokens.cache_clear()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    yield tmp_path / "home"
    read_tokens.cache_clear()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "gutenberg"
    folder.mkdir(parents=True)
    # The tenth file comes last, although "10" sorts before "2".
    for number, lines in ((2, LINES[:100]), (10, LINES[100:])):
        packed = bz2.compress("".join(lines).encode())
        (folder / f"train_{number}.txt.bz2").write_bytes(packed)
    (folder / "valid.txt").write_text("".join(LINES[:20]))
    return folder


def refuse_tokenisers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)


def test_tokens_give_the_text_back(corpus: Path) -> None:
    text = read_tokens(corpus.parent, VOCABULARY, None, "cpu")
    tokeniser = train_tokeniser(LINES, VOCABULARY)
    from tokenizers.decoders import ByteLevel

    tokeniser.decoder = ByteLevel()
    assert tokeniser.decode(text.training.tolist()) == "".join(LINES)
    assert tokeniser.decode(text.held_out.tolist()) == "".join(LINES[:20])
    assert VOCABULARY > int(text.training.max()) >= 256
    # Merged tokens: far fewer than bytes.
    assert len(text.training) < len("".join(LINES).encode()) / 2


def test_a_cached_corpus_needs_no_tokeniser(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_tokens(corpus, VOCABULARY, None, "cpu")
    files = sorted(path.name for path in (corpus / "gradwire-tokens").iterdir())
    assert [name[:9] for name in files] == ["bpe1-400-"] * 2
    assert [name.rpartition("-")[2] for name in files] == ["train.npy", "valid.npy"]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in corpus.glob("*/*.npy"))
    read_tokens.cache_clear()
    refuse_tokenisers(monkeypatch)
    again = read_tokens(corpus, VOCABULARY, None, "cpu")
    assert again.training.equal(first.training)
    assert again.held_out.equal(first.held_out)


@pytest.mark.parametrize("change", ["text", "vocabulary"])
def test_another_text_or_vocabulary_is_encoded_anew(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    read_tokens(corpus, VOCABULARY, None, "cpu")
    read_tokens.cache_clear()
    refuse_tokenisers(monkeypatch)
    if change == "text":
        (corpus / "valid.txt").write_text("another text")
    with pytest.raises(MissingExtra, match=r"tokenizers: pip install 'gradwire\[lm\]'"):
        read_tokens(corpus, VOCABULARY + (change == "vocabulary"), None, "cpu")


def test_a_folder_that_cannot_be_written_leaves_the_cache_to_the_users_directory(
    corpus: Path, home: Path
) -> None:
    # A file in place of the folder: permissions do not stop root.
    (corpus / "gradwire-tokens").write_text("")
    read_tokens(corpus, VOCABULARY, None, "cpu")
    assert len([*(home / ".cache" / "gradwire" / "tokens").glob("*.npy")]) == 2


def test_without_any_writable_folder_a_warning_says_so(
    corpus: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "gradwire-tokens").write_text("")
    home.write_text("")
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert len(read_tokens(corpus, VOCABULARY, None, "cpu").training) > 1000
    assert "tokens: not cached, since no folder can be written" in caplog.text


def test_a_named_cache_must_be_writable(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tokens: the cache folder cannot be written, .*file"):
        read_tokens(corpus, VOCABULARY, tmp_path / "file", "cpu")


def test_an_interrupted_write_leaves_no_file(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, array: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(KeyboardInterrupt):
        read_tokens(corpus, VOCABULARY, tmp_path / "cache", "cpu")
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (None, "cannot be read: "),
        (np.zeros(4, np.int64), "is not a list of uint16"),
        (np.full(4, VOCABULARY, np.uint16), f"has a token {VOCABULARY}"),
    ],
)
def test_a_damaged_cache_is_named(corpus: Path, array: np.ndarray | None, why: str) -> None:
    read_tokens(corpus, VOCABULARY, None, "cpu")
    read_tokens.cache_clear()
    [path] = (corpus / "gradwire-tokens").glob("*-train.npy")
    if array is None:
        path.write_bytes(b"no array")
    else:
        np.save(path, array)
    with pytest.raises(ConfigError) as caught:
        read_tokens(corpus, VOCABULARY, None, "cpu")
    assert f"{path} {why}" in str(caught.value)
    assert str(caught.value).endswith("delete it to encode the text again")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("valid.txt", None, "no valid.txt or valid.txt.gz or "),
        ("train_1.txt", None, "no train.txt or train_1.txt in "),
        ("train_1.txt", b"\xff", "is not UTF-8 text from byte 0"),
        ("train_1.txt.bz2", b"text", "cannot be unpacked: "),
        ("train_1.txt.bz2", bz2.compress(b"text")[:-4], "cannot be unpacked: "),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    for part in ("train_1", "valid"):
        if part != name.partition(".")[0]:
            (tmp_path / f"{part}.txt").write_text("text")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_tokens(tmp_path, VOCABULARY, None, "cpu")
    assert str(caught.value).startswith("Project Gutenberg: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("vocabulary", [255, 65_537])
def test_the_vocabulary_fits_bytes_and_uint16(corpus: Path, vocabulary: int) -> None:
    with pytest.raises(ConfigError, match=f"vocabulary must be from 256 to 65536 .*{vocabulary}"):
        read_tokens(corpus, vocabulary, None, "cpu")


def test_training_a_tokeniser_is_deterministic() -> None:
    assert find_spec("tokenizers") is not None
    first, second = (encode_lines(train_tokeniser(LINES, VOCABULARY), LINES) for _ in range(2))
    assert np.array_equal(first, second)
