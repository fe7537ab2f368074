"""Methods of other distributions: registered ones, and those of entry points."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire.cli.report import methods
from gradwire.compressors._sparsifier import Pipeline
from gradwire.compressors.topk import TopK
from gradwire.control.base import CONTROLLERS
from gradwire.exchange.gather import GatherExchange
from gradwire.identity import identity_of
from gradwire.memory.residual import Residual
from gradwire.plugins import Compressor, Controller, ControllerState, Sparsifier
from gradwire.registry import COMPRESSORS, EXCHANGES, MEMORIES, entry_points_of
from gradwire.spec import name_of, parse_exchange, parse_memory


@dataclass(frozen=True)
class Mine_TopK(TopK):
    """Sends what top-k sends."""


@dataclass(frozen=True)
class Kept(Residual):
    """Keeps what a residual keeps."""


@dataclass(frozen=True)
class Around(GatherExchange):
    """Gathers."""


@dataclass(frozen=True)
class Slow(gradwire.Accordion):
    """Decides what Accordion decides."""


class Other(TopK):
    """Is a frozen dataclass, too, with the same fields."""


class Plain(Controller):
    """Is no dataclass."""

    def create_state(self, *_: object) -> ControllerState:
        raise NotImplementedError


@dataclass(frozen=True)
class Half(Compressor):
    """Defines nothing."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Forgets what a test has registered, and the entry points that it has seen."""
    registries = (COMPRESSORS, MEMORIES, EXCHANGES, CONTROLLERS)
    before = [dict(registry._registered) for registry in registries]
    entry_points_of.cache_clear()
    yield
    entry_points_of.cache_clear()
    for registry, known in zip(registries, before, strict=True):
        registry._registered.clear()
        registry._registered.update(known)


def test_registered_classes_of_all_kinds_have_names() -> None:
    assert gradwire.register(Mine_TopK) is Mine_TopK
    gradwire.register(name="kept-2")(Kept)
    gradwire.register(Around)
    gradwire.register(Slow)
    mine = gradwire.parse("mine_topk:ratio=0.1")
    assert mine == Mine_TopK(ratio=0.1)
    assert name_of(mine) == "mine-topk"
    assert gradwire.parse(gradwire.format_spec(mine)) == mine
    assert isinstance(gradwire.parse("mine-topk:ratio=0.1 | qsgd"), Pipeline)
    assert parse_memory("kept-2:decay=0.5") == Kept(decay=0.5)
    assert parse_exchange("around:aggregate=median").name == "around"
    assert {"mine-topk", "topk"} <= set(gradwire.methods())
    # Ranks compare the class, since a name may mean another class elsewhere.
    assert identity_of(mine)["class"] == "test_plugins.Mine_TopK"


def test_registered_classes_train() -> None:
    gradwire.register(Mine_TopK)
    gradwire.register(Kept)
    gradwire.register(Around)
    gradwire.register(Slow)
    options = {"memory": "kept", "exchange": "around", "controller": "slow:low=0.5,high=0.25"}
    tensors = {"w": torch.zeros(64, 48)}
    own = gradwire.simulate(tensors, "mine-topk:ratio=0.5", workers=2, **options)
    options = {
        "memory": "residual",
        "exchange": "gather",
        "controller": "accordion:low=0.5,high=0.25",
    }
    usual = gradwire.simulate(tensors, "topk:ratio=0.5", workers=2, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grads = [{"w": torch.randn(64, 48, generator=generator)} for _ in range(2)]
        assert torch.equal(own.step(grads)["w"], usual.step(grads)["w"])
    assert own.stats()["memory"] == "kept"
    plan = own.workers[0].plan
    assert "test_plugins.Around" in plan.code_digests()


def test_a_class_defined_again_replaces_the_first() -> None:
    def define() -> type[TopK]:
        @gradwire.register(name="again")
        @dataclass(frozen=True)
        class Again(TopK):
            """Sends what top-k sends."""

        return Again

    define()
    second = define()
    assert type(gradwire.parse("again:ratio=0.1")) is second


@pytest.mark.parametrize(
    ("cls", "name", "text"),
    [
        (Mine_TopK, "topk", "there is a compressor 'topk' already, of gradwire; register "),
        (Mine_TopK, "auto", "and be none of auto, default, got 'auto'"),
        (Mine_TopK, "Top K", "a name must have small letters, digits and hyphens"),
        (Plain, "plain", "test_plugins.Plain must be a frozen dataclass, whose fields are its"),
        (Half, "half", "test_plugins.Half does not define decode, encode, nbytes, traits"),
        (Sparsifier, "sparse", "Sparsifier does not define "),
        (dict, "dict", "subclass of one of Compressor, Memory, Exchange, Controller, got builtins"),
        (TopK(ratio=0.1), "object", "got TopK(ratio=0.1"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(cls: type, name: str, text: str) -> None:
    with pytest.raises(gradwire.ConfigError, match=r"^register: ") as refused:
        gradwire.register(cls, name=name)
    assert text in str(refused.value)


def test_two_registered_classes_cannot_share_a_name() -> None:
    gradwire.register(Mine_TopK, name="same")
    with pytest.raises(gradwire.ConfigError, match=r"already, of test_plugins\.Mine_TopK; reg"):
        gradwire.register(Other, name="same")


MODULE = """
from dataclasses import dataclass
from gradwire.compressors.topk import TopK
from gradwire.memory.residual import Residual

@dataclass(frozen=True)
class Acme(TopK):
    '''Sends the entries that Acme likes.'''

@dataclass(frozen=True)
class Kept(Residual):
    '''Keeps everything.'''

NOT_A_CLASS = 1
"""

POINTS = """
[gradwire.compressors]
acme = acme_methods:Acme
broken = acme_broken:Broken
number = acme_methods:NOT_A_CLASS
memory = acme_methods:Kept

[gradwire.memories]
acme-kept = acme_methods:Kept
"""


def install(folder: Path, name: str, points: str) -> None:
    """Writes a distribution as pip leaves it behind."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed distributions, one of them broken."""
    install(tmp_path, "acme", POINTS)
    (tmp_path / "acme_methods.py").write_text(MODULE)
    (tmp_path / "acme_broken.py").write_text("raise OSError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("site")
def test_entry_points_have_names() -> None:
    acme = gradwire.parse("acme:ratio=0.1")
    assert type(acme).__module__ == "acme_methods"
    assert gradwire.format_spec(acme) == "acme:ratio=0.1"
    assert gradwire.format_spec(parse_memory("acme-kept")) == "acme-kept"
    assert "broken" in gradwire.methods()
    assert gradwire.register(type(acme), name="acme") is type(acme)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "broken",
            "compressor 'broken' cannot be imported from acme (acme_broken:Broken): OSError",
        ),
        ("number", "entry point number of acme: expected a subclass of Compressor, got 1"),
        ("memory", "expected a subclass of Compressor, got acme_methods.Kept"),
        ("acmee", "no compressor named 'acmee'; did you mean 'acme'?"),
    ],
)
def test_entry_points_that_cannot_be_used_raise_when_asked_for(name: str, text: str) -> None:
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.parse(f"{name}:ratio=0.1")
    assert text in str(refused.value)
    if name == "broken":
        assert isinstance(refused.value.__cause__, OSError)


def test_two_distributions_cannot_share_a_name(site: Path) -> None:
    install(site, "other", "[gradwire.compressors]\nacme = acme_methods:Other\n")
    install(site, "rival", "[gradwire.compressors]\ntopk = acme_methods:Acme\n")
    with pytest.raises(gradwire.ConfigError, match=r"by acme \(acme_methods:Acme\) and by other"):
        gradwire.parse("acme:ratio=0.1")
    with pytest.raises(gradwire.ConfigError, match=r"'topk' is offered by gradwire and by rival"):
        gradwire.parse("topk:ratio=0.1")
    with pytest.raises(gradwire.ConfigError, match=r"register: there is a compressor 'acme' alrea"):
        gradwire.register(Mine_TopK, name="acme")


@pytest.mark.usefixtures("site")
def test_the_command_line_lists_them_and_survives_broken_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "broken" in gradwire.methods()
    assert "acme_broken" not in sys.modules, "a name is listed without an import"
    methods(json=Path("-"), markdown=None)
    printed = capsys.readouterr()
    rows = {row["name"]: row for row in map(json.loads, printed.out.splitlines())}
    assert rows["acme"]["distribution"] == "acme"
    assert rows["topk"]["distribution"] == "gradwire"
    assert "broken" not in rows
    assert "gradwire: broken of acme cannot be used: ConfigError: compressor 'brok" in printed.err
    methods(json=None, markdown=None)
    assert "[acme] Aji & Heafield" in capsys.readouterr().out
