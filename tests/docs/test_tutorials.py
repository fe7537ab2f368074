"""The code and the commands of the tutorials run, in small form."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import run_shell, shortened, titled_blocks
from page_jobs import run_script

from gradwire.testing import ConformanceError
from processes import Ranks

DOCTOR_LIMIT_S = 120


def write_files(blocks: dict[str, str], folder: Path) -> None:
    """Writes the blocks whose title is a file name."""
    for title, text in blocks.items():
        if "." in title:
            (folder / title).write_text(text)


def printed_after(page: str, title: str) -> str:
    """Returns the output that a page shows below a command."""
    text = (Path(__file__).parents[2] / "docs/tutorials" / page).read_text("utf-8")
    return text.split(f'title="{title}"\n')[1].split("```text\n")[1].partition("\n```")[0]


@pytest.mark.parametrize("title", ["dense", "compressed", "topk"])
def test_first_run(two_ranks: Ranks, title: str) -> None:
    blocks = titled_blocks("tutorials/first-run.md")
    small = {"range(1, 401)": "range(1, 9)", "step % 100": "step % 4"}
    words = blocks[title].split()
    assert words[:4] == ["torchrun", "--nproc-per-node", "2", "train.py"]
    script = shortened(blocks["train.py"], small)
    out = two_ranks.run(run_script, script, *words[4:])[0]
    shown = printed_after("first-run.md", title)
    # Bytes of a step do not depend on how many there are.
    ratio = re.findall(r"^ratio: .*$", shown, re.MULTILINE)
    assert ratio == re.findall(r"^ratio: .*$", out, re.MULTILINE)
    keys = re.findall(r"^(\w+): ", shown, re.MULTILINE)
    assert re.findall(r"^(\w+): ", out, re.MULTILINE)[: len(keys)] == keys


def test_first_run_as_a_command(tmp_path: Path) -> None:
    blocks = titled_blocks("tutorials/first-run.md")
    script = shortened(blocks["train.py"], {"range(1, 401)": "range(1, 9)", "% 100": "% 4"})
    (tmp_path / "train.py").write_text(script)
    out = run_shell(blocks["compressed"], tmp_path)
    assert "step 8: loss " in out
    assert "spec: powersgd:rank=4\nsteps: 8\n" in out


@pytest.mark.timeout(DOCTOR_LIMIT_S)
@pytest.mark.parametrize("title", ["slow", "fast"])
def test_is_my_network_the_bottleneck(emulated: None, tmp_path: Path, title: str) -> None:
    blocks = titled_blocks("tutorials/is-my-network-the-bottleneck.md")
    write_files(blocks, tmp_path)
    command = shortened(blocks[title], {"--seconds 60": "--seconds 3"})
    out = run_shell(command, tmp_path, DOCTOR_LIMIT_S - 10)
    assert "DDP with 0.407 M parameters on 2 ranks, gloo" in out
    if title == "slow":
        assert "bottleneck: the links" in out
        assert 'link = gradwire.attach(model, "' in out
    else:
        # A busy machine may make even this link wait; the page's verdict is that of its run.
        assert re.search(r"bottleneck: (compute|both|the links|unknown)", out)


def test_advice_for_a_model(tmp_path: Path) -> None:
    blocks = titled_blocks("tutorials/is-my-network-the-bottleneck.md")
    write_files(blocks, tmp_path)
    out = run_shell(blocks["advise"], tmp_path)
    assert "mine:build: 0.407 M parameters on cpu" in out
    assert "Not advised, since the risk to accuracy is high:\nrandomk:ratio=0.01" in out
    assert re.search(r"^Use powersgd:rank=\d", out, re.MULTILINE)


@pytest.mark.parametrize("title", ["dense", "compressed", "qsparse", "diloco"])
def test_local_sgd_across_sites(four_ranks: Ranks, title: str) -> None:
    blocks = titled_blocks("tutorials/local-sgd-across-sites.md")
    script = shortened(blocks["sites.py"], {"STEPS = 160": "STEPS = 40"})
    method = blocks[title].split()[-1]
    out = four_ranks.run(run_script, script, method)[0]
    [sent] = re.findall(r", ([\d.]+) MB sent", printed_after("local-sgd-across-sites.md", title))
    [found] = re.findall(rf"^{method}: [\d.]+ s, accuracy [\d.]+%, ([\d.]+) MB sent$", out, re.M)
    assert float(found) == pytest.approx(float(sent) / 4, rel=0.1, abs=0.05)


@pytest.mark.timeout(DOCTOR_LIMIT_S)
def test_local_sgd_across_emulated_sites(emulated: None, tmp_path: Path) -> None:
    blocks = titled_blocks("tutorials/local-sgd-across-sites.md")
    write_files(blocks, tmp_path)
    small = shortened(blocks["sites.py"], {"STEPS = 160": "STEPS = 8"})
    (tmp_path / "sites.py").write_text(small)
    out = run_shell(blocks["qsparse"], tmp_path, DOCTOR_LIMIT_S - 10)
    assert re.search(r"^\[0\] qsparse: .* MB sent$", out, re.MULTILINE)


@pytest.fixture
def own_compressor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Writes the files of the page, as installed as a distribution; returns its blocks."""
    blocks = titled_blocks("tutorials/own-compressor.md")
    write_files(blocks, tmp_path)
    [(group, point)] = re.findall(
        r'^\[project\.entry-points\."(.*)"\]\n(.*)$', blocks["pyproject.toml"], re.M
    )
    info = tmp_path / "gradwire_blockmax-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gradwire-blockmax\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield blocks
    sys.modules.pop("blockmax", None)


def test_own_compressor(own_compressor: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    exec(own_compressor["try"], {})
    assert capsys.readouterr().out == printed_after("own-compressor.md", "try") + "\n"
    exec(own_compressor["check"], {})


def test_the_mistake_is_found(own_compressor: dict[str, str], tmp_path: Path) -> None:
    wrong = shortened(own_compressor["blockmax.py"], {"weight * scale": "scale"})
    (tmp_path / "blockmax.py").write_text(wrong)
    shown = printed_after("own-compressor.md", "check")
    with pytest.raises(ConformanceError) as found:
        exec(own_compressor["check"], {})
    # The page has not given it a name yet at this place; here an earlier test may have.
    text = f"gradwire.testing.case.ConformanceError: {found.value}"
    name = "blockmax.BlockMax"
    assert text.replace(name, "blockmax") == shown.replace(name, "blockmax")


def test_the_race(own_compressor: dict[str, str], tmp_path: Path) -> None:
    small = {
        "resnet9:width=8,batch_size=32,learning_rate=0.1 --data data": "resnet9-tiny",
        "--steps 400 --evaluate-every 200": "--steps 2 --evaluate-every 2",
    }
    out = run_shell(f"{shortened(own_compressor['race'], small)}\npython results.py", tmp_path)
    shown = printed_after("own-compressor.md", "results.py").splitlines()
    names = [line.split()[0] for line in shown]
    lines = [line.split() for line in out.splitlines()[-3:]]
    assert [line[0] for line in lines] == names
    assert all(line[3:6] == ["times", "fewer", "bytes,"] for line in lines)
