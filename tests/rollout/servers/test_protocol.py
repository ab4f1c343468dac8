"""After a load a server's greedy continuation is compared with the trainer's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import models
from rpg_jax.rollout.servers.client import ServerError
from rpg_jax.rollout.servers.protocol import Probe, ScoreRequest, Unusable, prober
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from tests.rollout.servers.conftest import PARAMS, REQUEST, Npy

CONFIG = models.DecoderConfig(
    vocab_size=50, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, hidden_dim=32
)
PROBE = Probe(
    np.arange(5, dtype=np.int32),
    np.array([[7, 8], [1, 2], [4, 3]], np.int32),
    np.array([[-0.5, -1.0], [-0.2, -1.8], [-0.6931, -0.6932]], np.float32),
    warns=0.02,
    fails=0.2,
    vocab_size=50,
)


def answer(tokens, logprobs, **changes):
    choice = {"token_ids": tokens, "prompt_token_ids": [0, 1, 2, 3, 4], "finish_reason": "length"}
    return {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}, **changes}]}


def test_the_difference_is_the_mean_over_tokens_and_names_the_one_that_differs_most():
    assert PROBE.difference(answer([7, 1, 4], PROBE.logprobs[:, 0].tolist())).mean == 0
    found = PROBE.difference(answer([7, 1, 4], [-0.5, -0.5, -0.6931]))
    assert (found.token, found.server) == (1, -0.5) and found.trainer == pytest.approx(-0.2)
    assert found.mean == pytest.approx(0.1)  # 0.3 of one token of three


def test_of_two_tokens_that_are_about_equally_probable_a_server_may_take_either():
    assert PROBE.difference(answer([7, 1, 3], [-0.5, -0.2, -0.6932])).mean == pytest.approx(1e-4 / 3, rel=0.01)


def test_another_token_counts_by_how_much_less_probable_the_trainer_finds_it_and_ends_the_comparison():
    found = PROBE.difference(answer([8, 30, 30], [-1.0, -9.0, -9.0]))
    assert (found.token, found.mean) == (8, 0.5)
    unknown = PROBE.difference(answer([30, 1, 4], [-0.1, -0.2, -0.7]))  # at most as probable as the last that is known
    assert unknown.mean == pytest.approx(0.9) and unknown.trainer == -1.0


def test_a_probe_that_is_cut_short_is_no_answer():
    with pytest.raises(Unusable, match="a completion of 1 tokens that ends with 'length' and did not"):
        PROBE.difference(answer([7], [-0.5]))


@pytest.mark.parametrize("tied", [True, False])
def test_a_probe_has_the_greedy_continuation_and_log_probs_of_passes_over_whole_prefixes(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    graphdef, params = models.init(config, seed=3, param_dtype=jnp.float32)
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)  # or all tokens are equally probable
    graphdef = models.abstract(config, compute_dtype=jnp.float32)[0]
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sizes = {"rows": 1, "replicated": where, "prompt": 9, "tokens": 4, "known_ids": 40}
    probe = prober(graphdef, config, "float32", **sizes)(params)
    assert probe.prompt.shape == (9,) and probe.prompt.max() < 40 and probe.tokens.shape == (4, 8)
    model, row = jax.jit(lambda p, t: _logprobs(graphdef, p, t)), probe.prompt.tolist()
    for tokens, logprobs in zip(probe.tokens, probe.logprobs, strict=True):
        expected = np.asarray(model(params, jnp.array([row])))
        assert tokens[0] == expected.argmax()
        # Rows of other lengths round sums of float32 otherwise.
        np.testing.assert_allclose(logprobs, np.sort(expected)[::-1][:8], atol=2e-5)
        np.testing.assert_allclose(logprobs, expected[tokens], atol=2e-5)
        row.append(int(tokens[0]))


def _logprobs(graphdef, params, tokens):
    from flax import nnx

    module = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.log_softmax(module.logits(module(tokens, positions, jnp.ones_like(tokens))[0, -1]))


def probed(far):
    """The trainer's numbers, of which that of the first token is `far` from the stand-in's."""
    tokens, logprobs = np.array([[7], [1], [4]], np.int32), np.array([[-0.5 + far], [-0.2], [-0.7]], np.float32)
    return dataclasses.replace(PROBE, tokens=tokens, logprobs=logprobs)


@pytest.fixture
def asked(stand_in, served, tmp_path):
    """A rollout whose server is probed after each load, and answers `far` from what the trainer expects."""

    def make(far):
        def fault(path, body):
            return answer([7, 1, 4], [-0.5, -0.2, -0.7]) if body and body.get("ignore_eos") else None

        server = stand_in(fault)
        rollout = served(server.url)
        params = jax.tree.map(jnp.asarray, PARAMS)
        rollout.weights = WeightFolders(
            params, tmp_path / "probed", Npy(), rollout._balance.use, probe=lambda _: probed(far)
        )
        rollout.sync_weights(params, 4)
        return rollout, server

    return make


def test_a_server_with_other_weights_ends_the_run_with_one_line_that_has_both_numbers(asked):
    rollout, server = asked(-0.9)
    line = (
        rf"^{server.url} and the trainer disagree by 0.3 nats on average about a greedy completion, after it has "
        r"loaded the trainer's weights: the log-prob of token 7 is -0.5000 there and -1.4000 here. The limit is 0.2 \("
    )
    with pytest.raises(ServerError, match=line):
        rollout.generate(REQUEST)


def test_a_small_difference_is_said_once_and_noted_with_each_load(asked, capsys):
    rollout, server = asked(-0.15)
    for version in (5, 6):
        rollout.generate(REQUEST)
        assert rollout.take_counts()["servers/probe_gap"] == pytest.approx(0.05, abs=1e-6)
        rollout.sync_weights(jax.tree.map(lambda x, v=version: x + v, jax.tree.map(jnp.asarray, PARAMS)), version)
    assert capsys.readouterr().err.count(f"warning: {server.url} and the trainer disagree by 0.05 nats") == 1
    assert server.paths().count("/collective_rpc") == 2


def test_a_load_that_vllm_would_refuse_again_ends_the_run_and_another_500_does_not(stand_in, served):
    said = {"error": {"message": "Call to collective_rpc method failed: Worker failed with error 'no such folder'"}}
    broken = stand_in(lambda path, body: (500, said) if path == "/collective_rpc" else None)
    with pytest.raises(ServerError, match=r"failed with error 'no such folder'.*\(servers.kind=vllm needs vLLM"):
        served(broken.url).generate(REQUEST)
    died = {"error": {"message": "EngineCore encountered an issue."}}
    calls = []

    def once(path, body):
        calls.append(path)
        return (500, died) if path == "/collective_rpc" and calls.count(path) == 1 else None

    assert all(served(stand_in(once).url).generate(REQUEST))


BY_TEXT = {"a": -1.0, "b": -1.0, "c": -1.0, "d": -1.0}


def scored(names=("a", "b", "c", "d"), logprobs=(None, -0.5, -1.25, -2.0)):
    return {"choices": [{"logprobs": {"tokens": list(names), "token_logprobs": list(logprobs)}}]}


def test_a_text_is_scored_from_its_first_completion_token_on():
    request = ScoreRequest(np.array([5, 6, 7, 8], np.int32), 2, "teacher")
    assert request.body["prompt"] == [5, 6, 7, 8] and request.body["model"] == "teacher"
    assert (request.body["max_tokens"], request.body["echo"], request.body["logprobs"]) == (0, True, 0)
    np.testing.assert_array_equal(request.read(scored()), np.array([-1.25, -2.0], np.float32))
    assert dataclasses.replace(request, names=True).read(scored()) == ["a", "b", "c", "d"]


def test_a_token_that_is_drawn_after_a_scored_text_is_not_read():
    """SGLang scores no text without drawing a token, and gives no scores with `logprobs` 0."""
    request = ScoreRequest(np.array([5, 6, 7], np.int32), 2, drawn=1)
    assert (request.body["max_tokens"], request.body["logprobs"]) == (1, 1)
    np.testing.assert_array_equal(request.read(scored()), np.array([-1.25], np.float32))
    assert dataclasses.replace(request, names=True).read(scored()) == ["a", "b", "c"]
    with pytest.raises(Unusable, match="3 log-probs and 3 texts of 4 tokens"):
        ScoreRequest(np.array([5, 6, 7, 8], np.int32), 2, drawn=1).read(scored())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"logprobs": None}]}, "no log-probs of the prompt"),
        ({"object": "error"}, "no log-probs of the prompt"),
        ({"choices": [{"logprobs": {"tokens": "ab" * 2, "token_logprobs": BY_TEXT}}]}, "the log-probs are no numbers"),
        (scored(logprobs=(None, -0.5, -(10**400), -2.0)), "the log-probs are no numbers"),
        (scored(logprobs=(None, -0.5, -1.25)), "3 log-probs and 4 texts of 4 tokens"),
        (scored(logprobs=(None, -0.5, -1.25, None)), "the log-probs are no numbers"),
        (scored(logprobs=(None, -0.5, 0.1, -2.0)), "positive, not finite or -9999"),
        (scored(logprobs=(None, -0.5, float("nan"), -2.0)), "positive, not finite or -9999"),
        (scored(logprobs=(None, -0.5, -9999.0, -2.0)), "positive, not finite or -9999"),
    ],
)
def test_an_answer_without_usable_scores_is_named(answer, message):
    with pytest.raises(Unusable, match=message):
        ScoreRequest(np.array([5, 6, 7, 8], np.int32), 2).read(answer)
