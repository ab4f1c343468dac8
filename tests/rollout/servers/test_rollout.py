"""Completions of servers over loopback: what is asked, what is refused by name, and what a failure changes: nothing."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.servers.client import Client, ServerError
from rpg_jax.rollout.servers.protocol import seed_of
from rpg_jax.rollout.servers.server import KINDS
from rpg_jax.rollout.serving.access import ApiKey

from .conftest import PARAMS, REQUEST, first_of, sampled

COMPLETIONS = "/v1/completions"
ONE = replace(REQUEST, prompts=REQUEST.prompts[:1], prompt_ids=[100], group_size=1)


def same(groups, request=REQUEST):
    """Whether these are the completions of the request, each of its own seed."""
    for place, group in enumerate(groups):
        for index, made in enumerate(group):
            seed = seed_of(request.seed, request.step, request.prompt_ids[place], index)
            expected = sampled({"seed": seed, "prompt": request.prompts[place].tolist()})
            assert made.tokens.tolist() == expected["token_ids"]
            np.testing.assert_array_equal(made.logprobs, np.float32(expected["logprobs"]["token_logprobs"]))
            assert made.finish_reason == expected["finish_reason"]
    return [len(group) for group in groups] == [request.group_size] * len(request.prompts)


def test_servers_load_the_weights_and_are_then_asked_with_every_parameter_named(stand_in, served):
    loaded = []

    def look(path, body):
        if path == "/collective_rpc":
            loaded.append(np.load(Path(body["kwargs"]["weights_path"]) / "w.npy"))

    servers, told = [stand_in(look), stand_in(look)], []
    rollout = served(*(server.url for server in servers), model="policy")
    assert same(rollout.generate(replace(REQUEST, on_group=lambda place, _: told.append(place))))
    assert sorted(told) == list(range(8))
    for server in servers:
        assert server.paths()[:4] == ["/pause?mode=abort", "/collective_rpc", "/reset_prefix_cache", "/resume"]
        assert set(server.paths()[4:]) == {COMPLETIONS}
    asked = servers[0].calls[4][1]
    assert asked | {"prompt": 0, "seed": 0} == {
        **{"model": "policy", "prompt": 0, "seed": 0, "n": 1, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9},
        **{"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"stop_token_ids": [0], "logprobs": 0, "return_token_ids": True},
    }
    rollout.sync_weights({"w": jnp.asarray(PARAMS["w"] + 1)}, 4)
    assert rollout.generate(REQUEST)[0][0].weight_version == 4
    assert len(loaded) == 4 and {int(w[0]) for w in loaded[2:]} == {1}
    rollout.sync_weights({"w": jnp.asarray(PARAMS["w"] + 2)}, 5)
    assert len(list(Path(rollout.weights._home).iterdir())) == 2  # the one before last is gone
    counts = {name: value for name, value in rollout.take_counts().items() if "/weights_" not in name}
    assert counts.pop("servers/longest_idle") < 0.3  # three looks
    assert counts == {
        **{"servers/answering": 2, "servers/requests": 32, "servers/refused": 0, "servers/failures": 0},
        **{"servers/loads": 4},
    }


def test_groups_that_the_caller_has_are_not_asked(stand_in, served):
    rollout = served(stand_in().url, parallel=32)
    found = rollout.generate(replace(REQUEST, done=frozenset({1, 2, 3, 4, 6, 7})))
    assert [len(group) for group in found] == [2, 0, 0, 0, 0, 2, 0, 0]
    assert same(rollout.generate(REQUEST))


def unusable(**changes):
    def answer(path, body):
        if path == COMPLETIONS:
            whole = {"token_ids": [1, 2, 3, 4], "prompt_token_ids": body["prompt"], "finish_reason": "length"}
            choice = whole | {"logprobs": {"token_logprobs": [-1.0] * 4}} | changes
            return {"choices": [{name: value for name, value in choice.items() if value != "absent"}]}

    return answer


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (unusable(token_ids="absent"), "no token_ids or no prompt_token_ids: the server must know return_token_ids"),
        (unusable(prompt_token_ids="absent"), "no token_ids or no prompt_token_ids"),
        (unusable(prompt_token_ids=7), "no token_ids or no prompt_token_ids"),
        (unusable(prompt_token_ids=[7]), "it has read another prompt, of 1 tokens in place of"),
        (unusable(logprobs=None), "no log-probs of the sampled tokens"),
        (unusable(logprobs={"token_logprobs": [None] * 4}), "the log-probs are no numbers"),
        (unusable(logprobs={"token_logprobs": [-(10**400), -1, -1, -1]}), "the log-probs are no numbers"),
        (unusable(logprobs={"token_logprobs": [-1.0] * 3}), "a completion of 4 tokens; the limit is 4"),
        (unusable(logprobs={"token_logprobs": [-1.0, 0.1, -1, -1]}), "log-probabilities that are positive"),
        (unusable(logprobs={"token_logprobs": [-1.0, float("nan"), -1, -1]}), "log-probabilities that are positive"),
        (unusable(token_ids=[1, 2, 3, 100]), "tokens from 1 to 100; the vocabulary has 100"),
        (unusable(token_ids=[1, 2.5, 3, 4]), "token_ids are no token ids"),
        (unusable(token_ids=[]), "token_ids are no token ids"),
        (
            unusable(finish_reason="stop"),
            r"ends with 'stop' and did not. It must stop at the tokens \[0\] and no other",
        ),
        (unusable(token_ids=[1, 2, 3]), "a completion of 3 tokens; the limit is 4"),
        (lambda path, body: {} if path == COMPLETIONS else None, "an answer of another form"),
        (
            lambda path, body: (404, {}) if path != "/health" else None,
            r"/pause\?mode=abort answered 404: {} \(servers.kind=vllm needs vLLM .*VLLM_SERVER_DEV_MODE=1.*\)$",
        ),
        (lambda path, body: (404, {"m": "no"}) if path == COMPLETIONS else None, "servers.model must name one of GET"),
        (
            lambda path, body: (400, {"m": "no"}) if path == COMPLETIONS else None,
            'completions answered 400: {"m": "no"}',
        ),
        (lambda path, body: {"success": False, "message": "no"}, "has not loaded .*weights-.*: no"),
        (lambda path, body: (302, None), "answered 302"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused_by_name(stand_in, served, fault, message):
    with pytest.raises(ServerError, match=message):
        served(stand_in(fault).url).generate(replace(REQUEST, sampling=replace(REQUEST.sampling, stop_token_ids=(0,))))


def test_log_probs_that_rounding_has_lifted_above_0_are_0(stand_in, served):
    lifted = unusable(logprobs={"token_logprobs": [1e-6, -0.0, -1.0, -2.0]})
    (made, _), *_ = served(stand_in(lifted).url).generate(REQUEST)
    assert made.logprobs.tolist() == [0, 0, -1, -2]


def once(what):
    """A server that answers its first completion so, and others that wait for that."""
    asked = threading.Event()

    def first(path, body):
        if path == COMPLETIONS and not asked.is_set():
            asked.set()
            return what
        return None

    def second(path, body):
        if path == COMPLETIONS:
            asked.wait(20)

    return first, second


@pytest.mark.parametrize("what", ["reset", (503, {}), (500, {}), (429, {}), {"choices": [{"finish_reason": "abort"}]}])
def test_what_a_server_has_not_answered_goes_to_the_others(stand_in, served, what):
    servers = [stand_in(fault) for fault in once(what)]
    rollout = served(*(server.url for server in servers))
    assert same(rollout.generate(REQUEST))
    assert rollout.take_counts()["servers/refused" if what == (429, {}) else "servers/failures"] == 1
    servers[1].end()
    assert same(rollout.generate(replace(REQUEST, step=7)), replace(REQUEST, step=7))  # the first one is back
    again = servers[0].paths().count("/collective_rpc")
    assert again == (1 if what == (429, {}) else 2)  # it may have been started anew, unless it was only busy


def test_a_server_that_is_killed_midway_and_started_anew_loads_the_weights_again(stand_in, served, until):
    killed = threading.Event()

    def fault(path, body):
        return "reset" if killed.is_set() else time.sleep(0.01)

    first, second = stand_in(fault), stand_in(lambda path, body: time.sleep(0.05))
    rollout, found = served(first.url, second.url), []
    request = replace(REQUEST, group_size=12)
    thread = threading.Thread(target=lambda: found.append(rollout.generate(request)))
    thread.start()
    until(lambda: len(first.calls) > 8)
    killed.set()
    first.end()
    until(lambda: first_of(rollout).resting)
    anew = stand_in(port=first.server_address[1])
    thread.join(20)
    assert same(found[0], request)
    until(lambda: COMPLETIONS in anew.paths() or len(second.calls) > 90)
    if anew.calls:
        assert anew.paths()[0] == "/pause?mode=abort"


def test_without_any_server_the_run_waits_says_so_and_ends_with_one_line(stand_in, served, capsys):
    server = stand_in()
    rollout = served(server.url, patience=0.3)
    server.end()
    with pytest.raises(RolloutError, match=r"no server has answered for 0.3 s \(servers.patience_seconds\): .*refused"):
        rollout.generate(REQUEST)
    assert same(served(stand_in().url).generate(REQUEST))


def test_a_request_that_only_times_out_ends_the_run(stand_in, served):
    servers = [stand_in(lambda path, body: time.sleep(1) if path == COMPLETIONS else None) for _ in range(4)]
    with pytest.raises(RolloutError, match="a request has failed 4 times, .*no answer in 0.3 s"):
        served(*(server.url for server in servers), timeout=0.3, rest=1.0).generate(ONE)


def test_this_projects_servers_prove_the_weights_with_every_answer(stand_in, served):
    checksum, others = [], [["0" * 16]]  # the first answer is of a server that was started anew
    lock = threading.Lock()

    def own(path, body):
        if path != COMPLETIONS:
            return {"success": True, "weights": checksum[0]}
        choice = sampled({"seed": body["counters"][3], "prompt": body["prompt"]})
        choice["sampler_logprobs"] = choice.pop("logprobs")["token_logprobs"]
        with lock:
            return {"choices": [choice], "weights": others.pop() if others else checksum}

    def loads():
        return sum("model_path" in body for _, body in server.calls)

    server = stand_in(own)
    rollout = served(server.url, kind=KINDS["rpg_jax"])
    checksum.append(f"{rollout.weights.checksum():016x}")
    rollout.generate(REQUEST)
    assert loads() == 2 and not others
    assert sorted({tuple(body["counters"]) for path, body in server.calls if path == COMPLETIONS}) == [
        (1, 6, prompt, i) for prompt in range(100, 108) for i in (0, 1)
    ]
    others.append([*checksum, "0" * 16])  # a completion of two policies
    assert len(rollout.generate(ONE)[0]) == 1 and not others
    assert loads() == 3
    checksum[0] = "1" * 16
    rollout.sync_weights({"w": jnp.asarray(PARAMS["w"] + 1)}, 5)
    rollout._balance._patience = 0.5
    with pytest.raises(RolloutError, match=f"has the weights {'1' * 16}, and the trainer"):
        rollout.generate(ONE)


def test_sglang_loads_again_after_a_request_that_must_end_first_and_after_an_answer_of_another_label(stand_in, served):
    """SGLang's answers have the label of its last load, and "default" after a start."""
    label, busy = [], ["Weights were updated, but the cache was not flushed because requests are still running."]

    def sglang(path, body):
        if path == "/update_weights_from_disk":
            label[:] = [body["weight_version"]]
            return (400, {"success": False, "message": busy.pop()}) if busy else {"success": True}
        if path == "/v1/completions":
            return {"choices": [sampled(body)], "metadata": {"weight_version": label[0]}}

    server = stand_in(sglang)
    rollout = served(server.url, kind=KINDS["sglang"])
    rollout.generate(REQUEST)
    assert server.paths().count("/update_weights_from_disk") == 2 and rollout.take_counts()["servers/failures"] == 1
    label[:] = ["default"]  # a new process in its place
    rollout.generate(replace(REQUEST, step=7))
    assert server.paths().count("/update_weights_from_disk") == 3 and rollout.take_counts()["servers/failures"] == 1


def test_another_program_asked_as_this_projects_server_ends_the_run_at_once(stand_in, served):
    server = stand_in(lambda path, body: {"success": True, "message": "Succeeded to update model weights."})  # SGLang's
    with pytest.raises(RolloutError, match=r"does not say which weights it has \(servers.kind=rpg_jax needs this proj"):
        served(server.url, kind=KINDS["rpg_jax"]).generate(REQUEST)
    assert len(server.calls) == 1


def test_seeds_of_a_group_differ_and_depend_on_every_counter():
    seeds = [seed_of(1, 2, 3, index) for index in range(64)]
    assert len(set(seeds)) == 64 and all(0 <= seed < 2**31 for seed in seeds)
    assert len({seed_of(*counters) for counters in ((1, 2, 3, 0), (2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0))}) == 4


def test_a_key_never_crosses_the_network_in_plain_text_nor_comes_back_in_a_message(stand_in, served):
    key = ApiKey("k" * 20)
    with pytest.raises(ValueError, match="the API key would go to http://10.0.0.7:8000 in plain text"):
        Client(key=key, timeout=1).check("http://10.0.0.7:8000")
    for url in ("10.0.0.7:8000", "ftp://h", "http://", "http://h:x", "http://h/?a=b", "http://u:p@h"):
        with pytest.raises(ValueError, match="is not of the form http://HOST:PORT"):
            Client(timeout=1).check(url)
    server = stand_in(lambda path, body: (401, {"error": f"not {'k' * 20}"}))
    with pytest.raises(RolloutError, match="answered 401") as refused:
        served(server.url, key=key).generate(REQUEST)
    assert "k" * 20 not in str(refused.value)


def test_every_kind_loads_by_calls_that_are_json():
    for kind in KINDS.values():
        assert all(json.dumps(body) and path.startswith("/") for path, body in kind.loads("/w", "3"))


def test_a_server_that_cannot_load_is_named_with_what_its_kind_needs(stand_in, served, capsys):
    """As vLLM with a model of other shapes: 500, again and again."""
    server = stand_in(lambda path, body: (500, {"error": "shape mismatch"}) if path == "/collective_rpc" else None)
    message = r"/collective_rpc answered 500: .*shape mismatch.*needs vLLM with a model of the trainer's shapes"
    with pytest.raises(ServerError, match=f"no server has answered for 1 s .*{message}"):
        served(server.url, patience=1).generate(REQUEST)
    assert "its last 3 calls have failed; it rests" in capsys.readouterr().err
