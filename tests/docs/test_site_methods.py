"""Pages of methods say what the classes say."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

import gradwire
from gradwire.errors import ConfigError
from pages import company, measure, methods, plot

DOCS = Path(__file__).parents[2] / "docs"
FOUND = {m.name: m for m in methods.methods()}


def test_the_wire_format_names_the_parts_of_every_method() -> None:
    assert set(FOUND) == set(gradwire.methods())
    assert methods.read_wire_parts(DOCS).keys() >= FOUND.keys()


def test_a_page_has_parameters_company_bytes_and_a_plot() -> None:
    page = methods.page(FOUND["topk"], {"topk": "positions and values"})
    assert page.startswith("# topk\n")
    assert "| `ratio` | `float` | must be given |" in page
    assert "| `values` | `fp32` or `bf16` or `fp16` | `bf16` |" in page
    assert "[arXiv:1704.05021](https://arxiv.org/abs/1704.05021)" in page
    assert "| contraction | yes |" in page
    assert "| unbiased | no |" in page
    nbytes = gradwire.TopK(ratio=0.01).encode(measure.noise((1024, 1024))).nbytes
    assert f"| 1,024 x 1,024 | {nbytes:,} |" in page
    assert "A message holds: positions and values" in page
    assert page.count("<svg") == 1


def test_a_page_without_a_wire_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wire\.md: no row for the parts of 'none'"):
        methods.page(FOUND["none"], {})


def test_company_is_what_attach_would_accept() -> None:
    topk, votes, low = (FOUND[name].usual for name in ("topk", "signsgd", "powersgd"))
    assert "residual" in company.legal_memories(topk)
    assert company.legal_memories(FOUND["terngrad"].usual) == ["none"]
    assert company.takes_exchange(topk, "gather")
    assert not company.takes_exchange(topk, "mean")
    assert not company.takes_exchange(votes, "sharded")
    assert company.takes_exchange(low, "mean")
    assert not company.takes_exchange(low, "gather")


def test_wire_parts_reads_several_names_a_row() -> None:
    text = "| method | parts |\n| --- | --- |\n| `a-b`, `c` | n bits |\n| a pipeline | more |\n"
    assert methods.wire_parts(text) == {"a-b": "n bits", "c": "n bits"}


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
    # A style inside would be one for all of the page.
    assert "<style" not in svg
