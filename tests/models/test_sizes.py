"""The table of published sizes has the published numbers of parameters."""

import pytest

from rpg_jax import models

# Billions of weights, as the model cards state them.
PUBLISHED = {
    "Qwen2-0.5B": 0.49,
    "Qwen2-1.5B": 1.54,
    "Qwen2-7B": 7.61,
    "Qwen2-72B": 72.7,
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "SmolLM2-135M": 0.135,
    "SmolLM2-360M": 0.362,
    "SmolLM2-1.7B": 1.71,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_those_of_the_model_cards(name):
    count = models.parameter_count(models.size(name)) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.03)  # the cards round to two or three digits


def test_a_size_has_its_address_on_the_hub():
    assert models.hub_address("qwen3-4b") == "Qwen/Qwen3-4B"
    assert models.hub_address("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"  # as the configs say
    assert models.hub_address("llama-3.2-1b") == "meta-llama/Llama-3.2-1B"
    assert models.hub_address("qwen3-4b-2507") == "Qwen/Qwen3-4B-Instruct-2507"  # there is no Qwen3-4B-2507


def test_names_are_found_in_any_case_and_typos_name_the_nearest():
    assert models.size("qwen3-4b") is models.SIZES["Qwen3-4B"]
    with pytest.raises(ValueError, match=r"unknown published size 'Qwen3-4'. Did you mean 'Qwen3-4B'"):
        models.size("Qwen3-4")
