"""Without its extra, `gradwire.keras` says what to install; nobody else pays for its imports."""

import subprocess
import sys

import pytest

import gradwire


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "gradwire.keras", raising=False)
    with pytest.raises(
        gradwire.MissingExtra, match=r"gradwire.keras needs keras: pip install 'lac"
    ):
        _ = gradwire.keras.DistributedOptimizer


def test_gradwire_imports_no_keras() -> None:
    code = "import sys, gradwire; sys.exit(bool({'keras', 'tensorflow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
