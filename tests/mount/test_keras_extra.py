"""Without its extra, `laconic.keras` says what to install; nobody else pays for its imports."""

import subprocess
import sys

import pytest

import laconic


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "laconic.keras", raising=False)
    with pytest.raises(laconic.MissingExtra, match=r"laconic.keras needs keras: pip install 'lac"):
        _ = laconic.keras.DistributedOptimizer


def test_laconic_imports_no_keras() -> None:
    code = "import sys, laconic; sys.exit(bool({'keras', 'tensorflow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
