"""Without its extra, `gradwire.keras` raises the install line; gradwire imports no Keras."""

import subprocess
import sys

import pytest

import gradwire


def test_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "gradwire.keras", raising=False)
    with pytest.raises(
        gradwire.MissingExtra, match=r"gradwire.keras needs keras: pip install 'gradwire\[tf\]'"
    ):
        _ = gradwire.keras.DistributedOptimizer


def test_gradwire_imports_no_keras() -> None:
    code = "import sys, gradwire; sys.exit(bool({'keras', 'tensorflow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
