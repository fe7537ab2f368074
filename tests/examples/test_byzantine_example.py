"""Runs the example of attacks, in a small form."""

from importlib.util import module_from_spec, spec_from_file_location

from example_jobs import FOLDER


def test_a_robust_aggregation_survives_what_the_mean_does_not() -> None:
    spec = spec_from_file_location("byzantine_attacks", FOLDER / "byzantine_attacks.py")
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    attack = "sign_flip:scale=10"
    honest = example.accuracy("none", "mean", 3, None, 0, 60)
    assert honest > 0.8
    assert example.accuracy("none", "mean", 3, attack, 0, 60) < 0.4
    assert example.accuracy("none", "diameter", 3, attack, 0, 60) > honest - 0.03
    assert example.accuracy("qsgd:bits=4", "multi_krum", 3, attack, 0, 60) > honest - 0.05
