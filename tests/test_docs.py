"""The pages made from the code are up to date, and their equations are the code's."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from docs import generate
from rpg_jax.losses.divergences import DIVERGENCES, gradient_weight
from rpg_jax.runs import config_files


@pytest.mark.parametrize("name", generate.FILES)
def test_the_committed_file_is_what_the_code_says(name):
    committed = (config_files.ROOT / name).read_text(encoding="utf-8")
    assert committed == generate.FILES[name](), "run python -m docs.generate"


def test_the_pages_are_written_into_a_folder_that_is_new(tmp_path):
    assert generate.main([f"--out={tmp_path / 'a' / 'b'}"]) == 0
    assert all((tmp_path / "a" / "b" / name).exists() for name in generate.FILES)


def value(latex: str, **symbols: np.ndarray) -> np.ndarray:
    """A formula of w, rho and r: what stands side by side is multiplied. Knows \\log, \\sqrt{…}, \\tfrac12 and ^."""
    text = latex.replace(r"\tfrac12", " 0.5 ").replace(r"\rho", " rho ").translate(str.maketrans("{}", "()"))
    tokens = re.findall(r"\\log|\\sqrt|\w+(?:\.\d+)?|[-+/()^]", re.sub(r"\\log r", r"\\log(r)", text))
    product = ""
    for before, token in zip(["", *tokens], tokens, strict=False):
        ends = before not in (r"\log", r"\sqrt") and (before == ")" or before[-1:].isalnum())
        product += "*" * (ends and token not in tuple("+-/)^")) + token.replace("\\", "np.").replace("^", "**")
    return eval(product, {"np": np, **symbols})


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_equations_of_a_divergence_are_its_function_and_its_gradient(name):
    log_w, log_rho = np.random.default_rng(0).normal(0, 1, (2, 50))
    symbols = {"w": np.exp(log_w), "rho": np.exp(log_rho), "r": np.exp(log_w - log_rho)}
    declared = DIVERGENCES[name]
    with jax.enable_x64(True):
        x = jnp.asarray(log_w), jnp.asarray(log_rho)
        expected = declared(*x), gradient_weight(declared, *x)
    np.testing.assert_allclose(
        value(declared.value, **symbols), expected[0], rtol=0, atol=1e-12
    )  # float64, values below 50
    np.testing.assert_allclose(value(declared.weight, **symbols), expected[1], rtol=0, atol=1e-12)


def test_every_field_has_a_meaning():
    sentences = {name: field.meaning for name, field in config_files.fields().items()}
    sentences |= {name: section.meaning for name, section in config_files.declared().sections()}
    assert [name for name, text in sentences.items() if not text.endswith(".")] == []


def test_the_page_shows_default_unit_and_meaning_of_every_field():
    page = generate.configuration_page()
    for name, field in config_files.fields().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        default, unit, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[2:5])
        assert default.strip("`*").split("*")[0] == field.initial.split(" (")[0]
        assert (unit, meaning.replace("\\|", "|")) == (field.unit, field.text)


@pytest.mark.slow
def test_the_site_is_made_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    subprocess.run(command, cwd=config_files.ROOT, check=True, timeout=600)
    methods = (tmp_path / "methods.html").read_text(encoding="utf-8")
    assert 'class="math' in methods and "searchindex.js" in {path.name for path in tmp_path.iterdir()}
    assert "rpg_jax.losses.divergences.reverse_kl" in (tmp_path / "api" / "losses.html").read_text(encoding="utf-8")
