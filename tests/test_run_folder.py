"""A run's config is read back, or the message says why not."""

import json

import pytest

from configs import tiny
from rpg_jax import run_folder
from rpg_jax.methods import resolve


def test_a_run_older_than_a_field_says_which_and_what_to_do(tmp_path):
    config = json.loads(resolve(tiny.get_config()).to_json_best_effort())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_folder.read_config(tmp_path).mesh.fsdp == -1
    del config["mesh"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"older version, .* mesh\.replica, mesh\.fsdp.*versions\.json"):
        run_folder.read_config(tmp_path)


def test_a_folder_that_is_no_run_lists_those_that_are(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"no config.json.*{tmp_path / 'a'}"):
        run_folder.read_config(tmp_path / "b")
