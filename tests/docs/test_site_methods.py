"""Pages of methods agree with the classes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

import gradwire
from gradwire.compressors._sparsifier import Pipeline
from gradwire.errors import ConfigError
from pages import compatibility, measure, methods, plot, wire

DOCS = Path(__file__).parents[2] / "docs"
FOUND = {m.name: m for m in methods.methods()}


def test_the_wire_format_names_the_parts_of_every_method() -> None:
    assert set(FOUND) == set(gradwire.methods())
    page = (DOCS / "reference" / "wire.md").read_text()
    table = page.split(wire.BEGIN)[1].split(wire.END)[0].strip()
    assert table == wire.messages(), "run: make table"
    assert all(f"`{name}`" in table for name in FOUND)


def test_a_page_has_parameters_compatibility_bytes_and_a_plot() -> None:
    page = methods.page(FOUND["topk"])
    assert page.startswith("# topk\n")
    assert "| `ratio` | `float` | must be given |" in page
    assert "| `values` | `fp32` or `bf16` or `fp16` | `bf16` |" in page
    assert "[arXiv:1704.05021](https://arxiv.org/abs/1704.05021)" in page
    assert "| contraction | yes |" in page
    assert "| unbiased | no |" in page
    nbytes = gradwire.TopK(ratio=0.01).encode(measure.noise((1024, 1024))).nbytes
    assert f"| 1,024 x 1,024 | {nbytes:,} |" in page
    assert "A message holds: positions, k values (fp32, bf16 or fp16) (" in page
    assert page.count("<svg") == 1


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "wire.md"
    page.write_text("no marks")
    with pytest.raises(ConfigError, match=r"wire\.md: expected the marks <!-- messages: begin -->"):
        wire.write_into(page)


def test_compatibility_is_what_attach_would_accept() -> None:
    topk, votes, low = (FOUND[name].usual for name in ("topk", "signsgd", "powersgd"))
    assert "residual" in compatibility.legal_memories(topk)
    assert compatibility.legal_memories(FOUND["terngrad"].usual) == ["none"]
    assert compatibility.takes_exchange(topk, "gather")
    assert not compatibility.takes_exchange(topk, "mean")
    assert not compatibility.takes_exchange(votes, "sharded")
    assert compatibility.takes_exchange(low, "mean")
    assert not compatibility.takes_exchange(low, "gather")


def test_methods_with_equal_messages_share_a_row() -> None:
    lines = wire.messages().splitlines()
    assert "| `efsign`, `sign` | n bits (1 = negative), scale as float32 |" in lines
    assert lines[-1] == f"| a pipeline | {Pipeline.message} |"


def test_bits_and_errors_are_measured() -> None:
    dense = FOUND["none"].usual
    assert [size.bits for size in measure.sizes(dense)] == [32, 32, 32]
    assert measure.error(dense, measure.gradient()) == 0
    half = gradwire.TopK(ratio=0.5, values="fp32")
    assert 0 < measure.error(half, measure.noise()) < 0.5**0.5


def test_bytes_as_a_formula() -> None:
    assert measure.formula(FOUND["none"].usual) == "4 n"
    assert measure.formula(gradwire.PowerSGD(rank=2)) == "8 (rows + columns)"
    assert measure.formula(FOUND["acpsgd"].usual) is None


def test_a_sweep_leaves_out_what_a_method_refuses() -> None:
    found = measure.sweep(FOUND["eden"].usual)
    assert found.axis == "bits"
    assert [point.x for point in found.points] == [1, 2, 3, 4]
    assert [point.error for point in found.points] == sorted(
        (point.error for point in found.points), reverse=True
    )
    assert measure.sweep(FOUND["efsign"].usual).axis == "elements"


def test_a_plot_is_svg_in_the_ink_of_the_page() -> None:
    svg = plot.draw(measure.sweep(FOUND["efsign"].usual), "a title")
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == "a title"
    assert "width" not in root.attrib
    assert "currentColor" in svg
    assert plot.INK not in svg
    # A style element inside would apply to the whole page.
    assert "<style" not in svg
