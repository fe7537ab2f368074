from pathlib import Path

import pytest

from gradwire.bench.report import figures
from gradwire.bench.report.figures import write_figures
from gradwire.errors import ConfigError, MissingExtra
from synthetic_others import others
from synthetic_runs import scaled, steps, training_runs


def test_without_matplotlib_the_error_has_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--plots needs matplotlib: pip install 'gradwire\[plo"):
        write_figures(training_runs(), tmp_path)


def test_every_plot_is_written_as_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    paths = write_figures([*scaled()[:3], *steps()[:3]], tmp_path / "new")
    names = {path.name for path in paths}
    assert {
        "1-final-accuracy-against-time.png",
        "1-loss-against-bytes-sent.svg",
        "1-accuracy-against-time.svg",
        "2-step-time.png",
    } <= names
    for path in paths:
        head = path.read_bytes()[:300]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in head
        assert path.stat().st_size > 3000


def test_changing_links_are_drawn_as_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    paths = write_figures(others(), tmp_path)
    assert [path.name for path in paths if path.suffix == ".svg"] == [
        "1-step-time-on-changing-links.svg",
        "2-predicted-step-by-number-of-workers.svg",
    ]
    assert "<!-- 50 Mbit/s -->" in paths[1].read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write plots to"):
        write_figures(training_runs(), tmp_path / "file")
