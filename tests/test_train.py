"""What would stop a run after minutes stops it at once, in one line with the fix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import qwen3_4b_2k, tiny
from rpg_jax.runs.resolve import check_training

ROOT = Path(__file__).parents[1]


def test_a_published_model_without_its_weights_is_refused_and_not_drawn_at_random():
    config = qwen3_4b_2k.get_config()
    fix = "hf download Qwen/Qwen3-4B --local-dir qwen3-4b, then --config.model.path=qwen3-4b, or "
    with pytest.raises(ValueError, match=f"model.size='qwen3-4b' says only shapes, .*{fix}"):
        check_training(config)
    config.model.path = "qwen3-4b"
    check_training(config)
    check_training(qwen3_4b_2k.get_config("tiny"))


def test_master_weights_in_which_updates_round_away_are_refused():
    config = tiny.get_config()
    config.model.param_dtype = "bfloat16"
    with pytest.raises(ValueError, match="model.param_dtype='bfloat16' .*0.0003 would be rounded .* leave it float32"):
        check_training(config)
    config = qwen3_4b_2k.get_config("tiny")
    config.model.param_dtype = "bfloat16"
    with pytest.raises(ValueError, match="optimizer.learning_rate=5e-07 would"):
        check_training(config)


@pytest.mark.parametrize(("name", "value", "off"), [("top_p", 0.9, 1), ("top_k", 5, 0), ("min_p", 0.1, 0)])
def test_sampling_ahead_from_a_cut_distribution_is_refused_by_name(name, value, off):
    """Stale completions would bring log-probs of the cut distribution, fresh ones get those of the full softmax."""
    config = tiny.get_config()
    config.rollout[name] = value
    check_training(config)
    config.rollout.max_staleness = 1
    fix = f"set rollout.{name}={off}, or rollout.max_staleness=0"
    with pytest.raises(ValueError, match=f"rollout.{name}={value} with rollout.max_staleness=1: .*{fix}"):
        check_training(config)
    config.rollout[name] = type(value)(off)
    check_training(config)


def test_a_correction_of_tokens_is_refused_for_stale_completions_that_are_weighed_as_a_whole():
    config = tiny.get_config()
    config.rollout.max_staleness = 1
    config.loss.level, config.loss.weight = "sequence", "product"
    for kind in ("truncate", "mask"):
        config.loss.sampler_correction = kind
        message = f"loss.weight=product weighs whole completions, and loss.sampler_correction={kind} .*=sequence, or"
        with pytest.raises(ValueError, match=message):
            check_training(config)
    config.loss.sampler_correction = "sequence"
    check_training(config)
    config.loss.sampler_correction, config.rollout.max_staleness = "truncate", 0
    check_training(config)


@pytest.mark.parametrize("field, package", [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_writer_that_is_not_installed_is_named(monkeypatch, field, package):
    config = tiny.get_config()
    config.log.tracker = field
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"log.tracker={field} needs the package {package}: pip install {package}"):
        check_training(config)


@pytest.mark.slow  # a process that starts JAX
@pytest.mark.parametrize("platforms, override", [("cuda", []), ("", ["--config.run.platform=gpu"])])
def test_an_accelerator_that_is_not_there_is_one_line(tmp_path, platforms, override):
    command = [sys.executable, "-m", "rpg_jax.train", f"--config.run.dir={tmp_path}", *override]
    env = os.environ | {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not any(tmp_path.iterdir())
    last = done.stderr.splitlines()[-1]  # CUDA itself may have said more
    assert last.startswith("error: no accelerator on ") and "cuda" in last and "Traceback" not in done.stderr
