"""Each row and each config of the paper's runs is its public recipe, field by field, or docs/errata.md names the field.

`recipes.json` has the fields of the sixty scripts of complex-reasoning/RPG at ec8e30b, recipe/rpg/7b. The paper ran its
4B tables with the same fields and other models and limits (arXiv:2505.17508, appendix H).
"""

import json
import re
from pathlib import Path

import pytest

from configs import qwen2p5_7b_instruct_2k, qwen2p5_math_7b, qwen3_4b_2k, qwen3_4b_4k, qwen3_4b_8k, qwen3_30b_a3b
from rpg_jax import models
from rpg_jax.losses import METHODS, verl
from rpg_jax.runs.learner import optimizer_arguments
from rpg_jax.runs.resolve import resolve
from rpg_jax.types import Count

FACTS = json.loads((Path(__file__).parent / "recipes.json").read_text(encoding="utf-8"))
RECIPES = {
    name: FACTS["common"] | dict(zip(FACTS["fields"], values, strict=True)) for name, values in FACTS["recipes"].items()
}
CONFIGS = {"Qwen2.5-Math-7B": qwen2p5_math_7b, "Qwen2.5-7B-Instruct": qwen2p5_7b_instruct_2k}
ROOT = Path(__file__).parents[1]
PAPER_TABLES = json.loads((ROOT / "rpg_jax" / "reproduction" / "paper_tables.json").read_text(encoding="utf-8"))
ERRATA = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")


def method_of(recipe):
    """The row of METHODS that a recipe is meant to be; None for what the paper has no row for."""
    baselines = {
        ("grpo", False): "DAPO",
        ("grpo", True): "GRPO",
        ("reinforce_plus_plus", True): "REINFORCE++",
        ("reinforce_plus_plus_baseline", True): "REINFORCE++-Baseline",
    }
    if recipe["adv_estimator"] != "rpg":
        return baselines[recipe["adv_estimator"], recipe["use_kl_loss"]]
    found = re.fullmatch(r"rpg_(rf_)?(u?[fr]kl)(_clip_ppo)?", recipe["kl_loss_type"])
    reinforce, divergence, clip = found.groups()
    if (reinforce and not clip) or not (reinforce or recipe["use_kl_loss"]):
        return None  # REINFORCE's hard clip, and no KL at all: one script each
    return f"RPG-{'REINFORCE-' if reinforce else ''}{divergence.upper()}"


ROWS = {name: method for name, recipe in RECIPES.items() if (method := method_of(recipe))}


def config_of(name):
    """The config of a recipe: file and method, and only what distinguishes the scripts of one method."""
    recipe = RECIPES[name]
    config = CONFIGS[recipe["model"]].get_config()
    config.method = ROWS[name]
    if recipe["clip_ratio_high"] == 0.1:
        config.loss.clip_low = config.loss.clip_high = 0.1
    if recipe["optim_type"] == "schedulefree":
        config.optimizer.name = "schedule_free_adamw"
    return resolve(config)


def recipe_of(config):
    """A resolved config in the words of the scripts."""
    c, loss = config, config.loss
    kinds = {"grpo": "low_var_kl", "reinforce_pp": "kl", "ppo": "low_var_kl"}
    estimators = {
        "group_standardised": "grpo",
        "whitened_returns": "reinforce_plus_plus",
        "whitened_group_mean": "reinforce_plus_plus_baseline",
        "group_mean": "rpg",
    }
    rpg = "" if loss.name != "rpg" else {"reinforce": "rpg_rf_", "differentiable": "rpg_"}[loss.estimator]
    ends = {"dual": "_clip_ppo", "reward": ""}
    dynamic, updates = c.dynamic_sampling, c.train.updates_per_step
    oversample = dynamic.oversample if dynamic.enabled else 1
    warmup, unit = c.optimizer.warmup.split()
    assert unit == "steps"
    return {
        "adv_estimator": estimators[loss.advantage],
        "use_kl_loss": bool(loss.kl_coef),
        "kl_loss_coef": loss.kl_coef or 0.0,
        "kl_loss_type": rpg + loss.divergence + ends[loss.clip] if rpg else kinds[loss.name],
        # every step, the behaviour policy is the reference; where there is no KL the recipes name no reference
        "use_iterative_ref_model": c.reference.rule == "every" and c.reference.every == "1 step",
        "clip_ratio_low": loss.clip_low,
        "clip_ratio_high": loss.clip_high,
        "clip_ratio_c": loss.clip_dual,
        "entropy_coeff": loss.entropy_coef,
        "loss_agg_mode": loss.aggregate.replace("_", "-"),
        "enable_filter_groups": dynamic.enabled,
        "max_num_gen_batches": dynamic.max_batches if dynamic.enabled else 1,
        "gen_prompt_bsz": oversample * c.rollout.prompts_per_step,
        "train_prompt_bsz": c.rollout.prompts_per_step,
        "train_prompt_mini_bsz": c.rollout.prompts_per_step / updates / c.train.epochs,
        "n_resp_per_prompt": c.rollout.group_size,
        "max_prompt_length": c.task.max_prompt_tokens,
        "max_response_length": c.rollout.max_tokens,
        "truncation": {"truncate": "left", "drop": "drop"}[c.task.too_long],
        "enable_overlong_buffer": c.rewards.overlong_shaping,
        "overlong_buffer_len": c.rewards.overlong_buffer,
        "overlong_penalty_factor": 1.0,  # that of `overlong_penalty`
        "temperature": c.rollout.temperature,
        "top_p": c.rollout.top_p,
        "top_k": c.rollout.top_k or -1,
        "optim_type": {"adamw": "adamw", "schedule_free_adamw": "schedulefree"}[c.optimizer.name],
        "lr": c.optimizer.learning_rate,
        "lr_warmup_steps": int(warmup),
        "weight_decay": c.optimizer.weight_decay,
        "grad_clip": c.optimizer.max_grad_norm,
        "test_freq": c.evaluation.every,
        "train_file": c.task.train,
        "test_files": sorted(entry.partition("=")[2] for entry in c.task.held_out_sets.split(",")),
    }


def named_by_errata(recipe):
    """Fields of a recipe that a row of docs/errata.md excepts, and the number of the row."""
    excepted = {"use_kl_in_reward": 1, "kl_coef": 1, "model": None}  # the model decides the config
    if "_rf_" in recipe["kl_loss_type"]:
        excepted["use_kl_loss"] = 1  # the KL term is in the loss that the public loop never calls
    return excepted


@pytest.mark.parametrize("name", ROWS)
def test_a_public_recipe_is_a_method_and_a_config_field_by_field(name):
    recipe = RECIPES[name] | {"test_files": sorted(RECIPES[name]["test_files"])}
    excepted = named_by_errata(recipe)
    ours = recipe_of(config_of(name))
    assert set(ours) | set(excepted) == set(recipe)
    expected = {field: recipe[field] for field in ours if field not in excepted}
    assert {field: ours[field] for field in expected} == expected
    assert all(f"| {row} | " in ERRATA for row in excepted.values() if row)


def test_all_scripts_but_two_are_rows_and_every_row_of_the_papers_table_8_has_scripts():
    assert len(RECIPES) == 60 and set(RECIPES) - set(ROWS) == {"run_rpg_7b_rkl1e-4_rf", "run_rpg_7b_schedulefree"}
    assert set(ROWS.values()) == set(PAPER_TABLES["table8_qwen2p5_7b_instruct"]) <= set(METHODS)


def test_the_scripts_models_are_the_configs_models():
    for model, config in CONFIGS.items():
        size = config.get_config().model.size
        assert models.size(size) == models.size(model.removesuffix("-Instruct"))


PAPER = (qwen3_4b_2k, qwen3_4b_4k, qwen3_4b_8k, qwen2p5_7b_instruct_2k, qwen2p5_math_7b, qwen3_30b_a3b)
LIMITS = {"max_response_length", "test_files"}  # 2,048 in all scripts; Tables 5 and 7 have longer ones and more sets


@pytest.mark.parametrize("config", PAPER, ids=lambda module: module.__name__.removeprefix("configs."))
def test_the_papers_configs_differ_from_the_scripts_in_model_length_and_sets_alone(config):
    c = config.get_config()
    c.method = "RPG-REINFORCE-URKL"
    ours = recipe_of(resolve(c))
    script = config_of("run_rpg_7b_urkl1e-4_rf_clip_ppo_0.2_0.28")
    different = {field for field, value in recipe_of(script).items() if ours[field] != value}
    assert different <= LIMITS
    assert {"AIME24=aime-2024", "AIME25=aime25", "AMC23=amc-23"} <= {*c.task.held_out_sets.split(",")}
    assert (c.train.steps, c.evaluation.k, c.evaluation.temperature) == (400, 32, 1.0)  # appendix H, section 5


def test_the_4k_config_evaluates_all_of_minerva_and_olympiadbench():
    """Table 7 has their scores at 4K; they have 272 and 674 problems, which Math-Verify grades."""
    c = qwen3_4b_4k.get_config()
    assert {"Minerva=minerva", "OlympiadBench=olympiadbench"} <= {*c.task.held_out_sets.split(",")}
    assert c.evaluation.problems >= 674 and c.rewards.parts == "by_source"


def test_table_7_has_scores_of_one_completion_of_every_problem():
    for scores in PAPER_TABLES["table7_qwen3_4b_4k_other"].values():
        for name, problems in (("Minerva-Math", 272), ("OlympiadBench", 674)):
            for score in scores[name].values():
                assert abs(score - round(score * problems) / problems) < 6e-5, (name, score)


def test_grpos_k3_has_the_public_clamp():
    assert METHODS["GRPO"].hyperparameters["kl_clamp"] == verl.KL_CLAMP == 10
    assert "kl_clamp" not in METHODS["GRPO-DeepSeekMath"].hyperparameters


def test_the_rows_of_the_differentiable_loss_are_not_clamped_and_the_errata_says_so():
    rows = [METHODS[f"RPG-{d}"].hyperparameters for d in ("FKL", "UFKL", "RKL", "URKL")]
    assert all("form" not in row for row in rows)
    [row] = [line for line in ERRATA.splitlines() if line.startswith("| 3 | ")]
    assert "`RPG-*`" in row and "loss.form=verl" in row


def test_ten_steps_of_warm_up_are_160_updates():
    """complex-reasoning/RPG at ec8e30b, verl/workers/fsdp_workers.py: the scheduler steps once a rollout batch."""
    arguments = optimizer_arguments(config_of("run_grpo_7b"))
    assert arguments["warmup"] == Count(10, "steps") and arguments["updates_per_step"] == 16
