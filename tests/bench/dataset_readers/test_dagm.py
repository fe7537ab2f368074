import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.bench.datasets.dagm import read_dagm, read_gray
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

RNG = np.random.default_rng(0)
HOME = "https://hci.iwr.uni-heidelberg.de/content/weakly-supervised"


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png(
    pixels: np.ndarray, filters: tuple[int, ...] = (0,), form: bytes = b"\x08\0\0\0\0"
) -> bytes:
    """Encodes a PNG whose lines use the filters in turn, each as the standard defines it."""
    rows, columns = pixels.shape
    wide = np.zeros((rows + 1, columns + 1), int)
    wide[1:, 1:] = pixels
    left, up, corner = wide[1:, :-1], wide[:-1, 1:], wide[:-1, :-1]
    target = left + up - corner
    nearest = np.argmin([abs(target - left), abs(target - up), abs(target - corner)], axis=0)
    paeth = np.choose(nearest, [left, up, corner])
    predicted = [np.zeros_like(up), left, up, (left + up) // 2, paeth]
    lines = bytearray()
    for row in range(rows):
        kind = filters[row % len(filters)]
        lines.append(kind)
        lines += ((pixels[row].astype(int) - predicted[kind][row]) % 256).astype(np.uint8).tobytes()
    packed = zlib.compress(bytes(lines))
    header = struct.pack(">II", columns, rows) + form
    body = chunk(b"IHDR", header) + chunk(b"tEXt", b"a note")
    body += chunk(b"IDAT", packed[:20]) + chunk(b"IDAT", packed[20:])
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("filters", [(0,), (1,), (2,), (3,), (4,), (4, 1, 3, 0, 2)])
def test_every_filter_of_png_is_undone(filters: tuple[int, ...]) -> None:
    pixels = RNG.integers(0, 256, (9, 13), dtype=np.uint8)
    assert (read_gray(png(pixels, filters)) == pixels).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GIF89a", "is not a PNG image"),
        (png(np.zeros((4, 4), np.uint8))[:-20], "ends after "),
        (png(np.zeros((4, 4), np.uint8))[:10], "ends after 10 bytes"),
        (png(np.zeros((4, 4), np.uint8), form=b"\x08\2\0\0\0"), "of 8 bit grey"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IEND", b""), "has no header"),
    ],
)
def test_a_file_that_is_not_a_grey_png_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_gray(content)


def write_folders(folder: Path) -> None:
    """Writes two images with a defect in Train, one in Test, and four without."""
    for part, numbers, defects in (("Train", (1, 2, 3, 4), (1, 3)), ("Test", (5, 6, 7), (6,))):
        label = folder / "Class1" / part / "Label"
        label.mkdir(parents=True)
        for number in numbers:
            pixels = np.full((512, 512), 10 * number, np.uint8)
            (label.parent / f"{number:04}.PNG").write_bytes(png(pixels))
        for number in defects:
            mask = np.zeros((512, 512), np.uint8)
            mask[100:200, 2 * number : 40] = 255
            (label / f"{number:04}_label.PNG").write_bytes(png(mask))


def test_images_are_read_at_half_their_size_with_their_masks(tmp_path: Path) -> None:
    write_folders(tmp_path)
    training, held_out = read_dagm(tmp_path, "cpu", defects=3)
    # The first and the sixth are held out: a defect, and none.
    assert held_out.pixels.shape == (2, 1, 256, 256)
    levels = [*held_out.pixels[:, 0, 0, 0].tolist(), *training.pixels[:, 0, 0, 0].tolist()]
    by_defect = sorted(levels[0:1] + levels[2:4]), sorted(levels[1:2] + levels[4:])
    assert by_defect[0] == [10, 30, 60]
    assert set(by_defect[1]) <= {20, 40, 50, 70}
    masks = torch.cat([held_out.masks[:1], training.masks[:2]]).sum((1, 2, 3))
    sizes = dict(zip([levels[0], *levels[2:4]], masks.tolist(), strict=True))
    assert sizes == {10: 50 * 19, 30: 50 * 17, 60: 50 * 14}
    assert not held_out.masks[1].any()


def test_the_compact_file_is_read(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (2, 5, 256, 256), dtype=np.uint8)
    masks = RNG.integers(0, 2, (5, 256, 256), dtype=np.uint8)
    path = tmp_path / "dagm_class1_256.npz"
    np.savez(path, defect=images[0], free=images[1], mask=np.packbits(masks, axis=-1))
    training, held_out = read_dagm(tmp_path, "cpu", defects=5)
    assert torch.equal(held_out.masks[0, 0], torch.from_numpy(masks[0]))
    assert torch.equal(training.pixels[0, 0], torch.from_numpy(images[0, 1]))
    assert len(training.pixels) == 8
    assert not training.masks[4:].any()
    path.write_bytes(path.read_bytes()[:-100])
    read_dagm.cache_clear()
    with pytest.raises(
        ConfigError, match=r"dagm_class1_256\.npz is not an \.npz file with defect, "
    ):
        read_dagm(tmp_path, "cpu", defects=5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("Train/0003.PNG", None, "cannot be read: No such file"),
        ("Train/0003.PNG", png(np.zeros((512, 512), np.uint8))[:-50], "ends after "),
        ("Test/Label/0006_label.PNG", png(np.zeros((4, 4), np.uint8)), "has (4, 4) pixels"),
        ("Test/Label/0006_label.PNG", None, "has 2 defective images, the official file 3"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    write_folders(tmp_path)
    file = tmp_path / "Class1" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_dagm(tmp_path, "cpu", defects=3)
    error = str(caught.value)
    assert message in error
    assert name in error or "official file 3" in error
    assert f"get it again from {HOME}" in error


def test_a_folder_without_the_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dagm_class1_256\.npz or Class1/Train in "):
        parse_workload("unet", tmp_path).batch(0, 0, 1, 0)


def test_images_and_masks_are_flipped_alike() -> None:
    workload = parse_workload("unet-tiny")
    inputs, targets = workload.batch(step=1, rank=0, workers=1, seed=0)
    # Defects are brighter than the mean of the noise.
    assert inputs[targets > 0].mean() > inputs[targets == 0].mean() + 0.5
