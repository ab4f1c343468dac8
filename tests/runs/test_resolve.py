"""A config is filled in from its method's row, and what cannot run is refused before anything is computed."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import qwen3_4b_2k, tiny
from rpg_jax import losses
from rpg_jax.rewards import verifiers
from rpg_jax.runs import config_files, reinforcement, run_folder
from rpg_jax.runs.arguments import loss_arguments, reward_arguments
from rpg_jax.runs.reinforcement import check_rows
from rpg_jax.runs.resolve import check_sampling, check_training, resolve


def resolved(**changes):
    config = tiny.get_config()
    config.update_from_flattened_dict(changes)
    return resolve(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.every": 0}, r"evaluation.every=0 must be in \[1, 1e12\]; for never, a number above train.steps"),
        ({"rollout.temperature": None}, "rollout.temperature=None: the field is always set; its default is 1.0"),
        ({"evaluation.k": 0}, r"evaluation.k=0 must be in \[1, 1e5\]$"),
        ({"mesh.tensor": 0}, "mesh.tensor=0: an axis has 1 device or more, or -1 for all that are left"),
        ({"model.compute_dtype": "int8"}, "model.compute_dtype='int8': One of bfloat16, float32"),
        ({"rewards.parts": "exact:nan"}, "the weight of the reward 'exact' must be a number within"),
        ({"train.updates_per_step": 3}, "rollout.prompts_per_step=64 must be a multiple of train.updates_per_step=3"),
        ({"rewards.overlong_buffer": 6}, r"rewards.overlong_buffer=6 must be in \[1, rollout.max_tokens=5\]"),
        ({"rollout.group_size": 1}, "group_size=1: loss.advantage=group_mean compares the completions of a prompt"),
        (
            {"rollout.group_size": 1, "method": "REINFORCE++"},
            "group_size=1: dynamic sampling drops such groups; set dyn",
        ),
        ({"optimizer.warmup": "10"}, "optimizer.warmup='10' must be a number with its unit"),
        ({"profile.steps": "14-12"}, "profile.steps is one step or a range of steps, as 12 or 12-14, not '14-12'"),
        ({"reference.every": "2 epochs"}, "reference.every='2 epochs' must be a number with its unit"),
        ({"rewards.parts": "exact,format", "rewards.format": "numbr"}, "rewards.format='numbr': did you mean 'number'"),
        ({"rewards.parts": "exakt"}, "unknown reward 'exakt'; known: .*exact"),
        ({"rewards.parts": "format"}, "no verifier among"),
        ({"rewards.parts": "exact,format", "rewards.accuracy": "format"}, "rewards.accuracy='format' must be a verif"),
        ({"rewards.parts": "judge", "judge.url": "http://x"}, "decides accuracy, and grades: add --config.rewards.rig"),
        (
            {"rewards.parts": "environment"},
            "rewards.parts=environment is what an environment pays: set environment.name",
        ),
        ({"environment.name": "m:E", "environment.options": "high=5"}, "environment.options='high=5' is not JSON"),
        ({"environment.name": "m:E", "environment.options": "5"}, "environment.options='5' must be an object of JSON"),
        ({"environment.name": "m:E", "environment.turn_tokens": 6}, "environment.turn_tokens=6 is more than rollout"),
        (
            {"rollout.driver": "fleet"},
            "rollout.driver=fleet is retired .* --config.rollout.driver=servers --config.serv",
        ),
        ({"rollout.driver": "simple"}, "rollout.driver=simple is retired .*write --config.rollout.driver=lockstep"),
        ({"servers.kind": "vlm"}, "servers.kind='vlm': did you mean 'vllm'"),
        (
            {"offload": "optimiser"},
            "offload='optimiser': did you mean 'optimizer'. One of \"\", optimizer, reference, opt",
        ),
        ({"run.platform": "CPU"}, "run.platform='CPU': One of tpu, gpu, cpu, cuda, rocm"),
        (
            {"model.lora.path": "a"},
            "model.lora.path=a with model.lora.rank=0: set the rank and the alpha of this adapter",
        ),
        ({"method": "CTPO", "reference.path": "T"}, "loss.name=ctpo has no KL term, so nothing would be learned from"),
        (
            {"method": "DAPO", "reference.path": "T"},
            "loss.name=ppo has no KL term, .* leave the teacher out, or take a",
        ),
        (
            {"loss.arguments": '{"estimator": "exact"}'},
            "sets estimator, which has a field: set loss.estimator alone",
        ),
        (
            {"loss.arguments": '{"weight": "product"}'},
            "sets weight, which has a field: set loss.weight alone",
        ),
        (
            {"loss.arguments": '{"tau": 1, "tau": 2}'},
            "loss.arguments=.* is not JSON .the key 'tau' stands twice.: write",
        ),
        ({"loss.constant_length": 5}, "loss.constant_length is read by loss.aggregate=constant, not by"),
        ({"loss.sampler_high": 2.0}, "sampler_high bounds a sampler_correction: name one"),
    ],
)
def test_what_could_only_fail_later_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


def test_a_comma_after_the_last_reward_is_no_reward():
    assert reward_arguments(resolved(**{"rewards.parts": "exact:1, format:0.1,"}))[0].keys() >= {"exact", "format"}


def test_the_reward_is_the_environments_where_there_is_one_and_none_is_named():
    assert resolved().rewards.parts == "exact"
    assert resolved(**{"environment.name": "m:E"}).rewards.parts == "environment"
    assert resolved(**{"environment.name": "m:E", "rewards.parts": "exact"}).rewards.parts == "exact"


def test_the_overlong_buffer_is_the_papers_share_of_the_limit_where_nobody_sets_it():
    for limit, buffer in ((8, 2), (3, 1), (1024, 256), (2048, 512), (8192, 512)):
        assert (
            resolved(**{"rollout.max_tokens": limit, "rewards.overlong_buffer": None}).rewards.overlong_buffer == buffer
        )


def test_an_evaluation_with_a_lower_limit_than_the_runs_buffer_is_scored():
    run = resolved(**{"rollout.max_tokens": 1024, "rewards.overlong_shaping": True, "rewards.overlong_buffer": 256})
    evaluated = config_files.changed(run, {"rollout.max_tokens": 200})
    weights, options = reward_arguments(evaluated)
    verifiers.check(weights, options)
    assert options["overlong"] == {"limit": 200, "buffer": 200}
    assert reward_arguments(run)[1]["overlong"] == {"limit": 1024, "buffer": 256}


def test_overlong_shaping_that_is_off_needs_no_buffer():
    resolved(**{"rewards.overlong_buffer": 6, "rewards.overlong_shaping": False})


def test_the_constant_of_an_aggregate_is_the_completion_budget_whichever_method_it_is_set_for():
    for method in ("RPG-URKL", "GRPO", "Dr.GRPO"):
        config = resolved(**{"method": method, "loss.aggregate": "constant", "rollout.max_tokens": 7})
        assert config.loss.constant_length == 7
    assert resolved(**{"method": "Dr.GRPO", "loss.aggregate": "token_mean"}).loss.constant_length is None
    assert resolved(**{"method": "Dr.GRPO", "loss.constant_length": 3}).loss.constant_length == 3


TOKENS = {
    "logprobs": jnp.log(jnp.array([[0.9, 0.3, 0.1, 0.5]])),
    "behaviour_logprobs": jnp.log(jnp.array([[0.1, 0.5, 0.4, 0.5]])),
    "ref_logprobs": jnp.log(jnp.array([[0.2, 0.6, 0.5, 0.4]])),
    "sampler_logprobs": jnp.log(jnp.array([[0.1, 0.5, 0.4, 0.5]])),
    "advantages": jnp.array([[-1.0, 1.0, -0.5, 0.0]]),
    "mask": jnp.ones((1, 4)),
}


def gradient(name, tokens=TOKENS, **hyperparameters):
    others = {k: v for k, v in tokens.items() if k != "logprobs"}

    def loss(logprobs):
        total, weight, _ = losses.policy_loss(name, logprobs=logprobs, **others, **hyperparameters)
        return total / weight

    return jax.jit(jax.grad(loss))(tokens["logprobs"])


def test_the_corrected_kl_term_of_grpo_is_trained_where_the_config_asks_for_it():
    w, y = (jnp.exp(TOKENS["logprobs"] - TOKENS[k]) for k in ("behaviour_logprobs", "ref_logprobs"))
    cases = [
        (m, *case)
        for m in ("GRPO", "GRPO-DeepSeekMath")
        for case in (("none", 1 - 1 / y), ("importance", w * jnp.log(y)))
    ]
    for method, weighting, expected in cases:
        config = resolved(**{"method": method, "loss.kl_coef": 0.5, "loss.kl_weighting": weighting})
        name, hyperparameters = loss_arguments(config)
        found = gradient(name, TOKENS | {"advantages": jnp.zeros((1, 4))}, **hyperparameters)  # the KL term is left
        np.testing.assert_allclose(found, 0.5 / 4 * expected, rtol=1e-5)  # the mean of four tokens


def test_only_the_loss_that_takes_them_has_the_fields_of_grpos_kl_term():
    clamped = {"loss.arguments": '{"kl_clamp": 3.0}'}
    assert loss_arguments(resolved(**{"method": "GRPO"} | clamped))[1]["kl_clamp"] == 3.0
    for name, fields in {"kl_weighting": {"loss.kl_weighting": "importance"}, "kl_clamp": clamped}.items():
        with pytest.raises(ValueError, match=f"unknown hyperparameter of loss 'rpg': '{name}'"):
            resolved(**fields)
    with pytest.raises(ValueError, match=r"loss\.kl_weighting='k3': One of none, importance"):
        resolved(**{"method": "GRPO", "loss.kl_weighting": "k3"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("ppo", {}),
        *(("rpg", {"clip": c, "form": f}) for c in ("dual", "truncate") for f in ("paper", "verl")),
    ],
)
def test_an_infinite_dual_bound_is_none(name, options):
    config = resolved(**{"method": "DAPO", "loss.clip_dual": float("inf")})
    assert loss_arguments(config)[1]["clip_dual"] == float("inf")
    infinite, none = (gradient(name, clip_dual=c, **options) for c in (float("inf"), None))
    np.testing.assert_array_equal(infinite, none)
    assert np.all(np.isfinite(none))


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
def test_training_from_a_cut_distribution_is_refused_by_name(name, value, off):
    """What the bias is: tests/losses/test_sampler_correction.py."""
    config = tiny.get_config()
    check_sampling(config)
    config.rollout[name] = value
    with pytest.raises(ValueError, match=f"rollout.{name}={value} cuts .* Set rollout.{name}={off} to train"):
        reinforcement.run(resolve(config))


def test_a_row_that_the_longest_completion_does_not_fit_is_refused_before_the_run_begins():
    config = tiny.get_config()
    config.train.packed_length = 10
    with pytest.raises(
        ValueError, match="train.packed_length=10 cannot hold .* of 11 tokens at most: set train.packed"
    ):
        reinforcement.run(resolve(config))
    config.train.packed_length = 11
    check_rows(config)


def test_a_correction_of_tokens_is_refused_for_stale_completions_that_are_weighed_as_a_whole():
    config = tiny.get_config()
    config.rollout.max_staleness = 1
    config.loss.level, config.loss.weight = "sequence", "product"
    for kind in ("truncate", "mask"):
        config.loss.sampler_correction = kind
        message = f"loss.weight=product weighs completions .*, and loss.sampler_correction={kind} .*=sequence, or"
        with pytest.raises(ValueError, match=message):
            check_training(config)
    config.loss.sampler_correction = "sequence"
    check_training(config)
    config.loss.sampler_correction, config.rollout.max_staleness = "truncate", 0
    check_training(config)


def test_a_correction_of_tokens_is_refused_for_stale_completions_whose_prefixes_are_weighed():
    config = tiny.get_config()
    config.method, config.rollout.max_staleness = "CTPO", 1
    for kind in ("truncate", "mask"):
        config.loss.sampler_correction = kind
        with pytest.raises(ValueError, match=f"loss.name=ctpo weighs completions or .*correction={kind} .*=sequence"):
            check_training(config)
    for kind in ("sequence", "anchor", None):
        config.loss.sampler_correction = kind
        check_training(config)


@pytest.mark.parametrize("field, package", [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_writer_that_is_not_installed_is_named(monkeypatch, field, package):
    config = tiny.get_config()
    config.log.tracker = field
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"log.tracker={field} needs the package {package}: pip install {package}"):
        run_folder.named(config, "tiny.py", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.driver": "orchestrator"}, "servers.urls=http://h:1 is read by rollout.driver=servers alone"),
        ({"servers.urls": ""}, "rollout.driver=servers needs servers.urls: http"),
        ({"servers.weights": None}, "needs servers.weights, a local folder that the servers see too, got None"),
        ({"servers.weights": "gs://b/w"}, "servers.weights, a local folder .*, got 'gs://b/w'"),
        ({"rollout.int8": True}, "int8 and int8_kv are the servers' own choice"),
        ({"rollout.devices": 1}, "needs rollout.devices=0"),
    ],
)
def test_servers_that_do_not_fit_are_refused_before_anything_is_loaded(changes, message):
    config = tiny.get_config()
    fits = {"rollout.driver": "servers", "servers.urls": "http://h:1", "servers.weights": "/w"}
    config.update_from_flattened_dict(fits)
    check_training(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        check_training(config)
