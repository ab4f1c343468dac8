import pytest

from rpg_jax.rewards.verifiers import SOURCES, VERIFIERS, name_for_source


def test_every_source_has_a_verifier_and_an_unknown_one_is_refused():
    assert set(SOURCES.values()) <= set(VERIFIERS)
    assert name_for_source("aime2025") == "math_dapo"
    with pytest.raises(ValueError, match="'poetry'.*math_verify"):
        name_for_source("poetry")
