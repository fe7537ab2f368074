"""The pytest plug-in: one test for each property of the conformance suite.

    @pytest.mark.conformance(MyTopK(ratio=0.1), MyTopK(ratio=1.0))
    def test_conformance(conformance):
        conformance()

Nothing else is imported before a test asks for it, since pytest loads plug-ins in every run.
"""

import pytest

MARK = "conformance"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(*items): the test's argument `{MARK}` is each property of Gradwire's conformance "
        "suite in turn, as a function; items are compressors, memories, controllers or exchanges",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        return
    from gradwire.errors import ConfigError
    from gradwire.testing import properties

    if MARK not in metafunc.fixturenames or not marker.args:
        raise ConfigError(
            f"{metafunc.function.__name__}: the mark {MARK} needs items to check, and a test "
            f"with an argument {MARK!r}"
        )
    found = [one for item in marker.args for one in properties(item)]
    metafunc.parametrize(MARK, found, ids=str)
