"""What a trainer with servers refuses before it asks any."""

import contextlib
from types import SimpleNamespace

import pytest

from configs import tiny
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.served_trainer import _home, make_served, make_served_teacher
from rpg_jax.types import Sampling
from tests.rollout.servers.conftest import StandIn

URLS = {"servers.urls": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "servers.urls='': give http://HOST:PORT of each server once"),
        ({"servers.urls": "http://h:1, http://h:1"}, "give http://HOST:PORT of each server once"),
        ({"servers.urls": "h:1"}, "the server's address 'h:1' is not of the form http://HOST:PORT"),
        (URLS | {"KEY": "k"}, "the variable RPG_JAX_SERVERS_KEY: an API key has at least 16"),
        (
            URLS | {"servers.certificate": "/none.pem", "servers.urls": "https://h"},
            "the servers' certificate /none.pem: No",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message, monkeypatch):
    monkeypatch.setenv("RPG_JAX_SERVERS_KEY", changes.get("KEY", ""))
    config = tiny.get_config()
    fields = {name: value for name, value in changes.items() if name != "KEY"}
    config.update_from_flattened_dict({"rollout.driver": "servers", **fields})
    config = resolve(config)
    tokenizer = SimpleNamespace(eos_id=0, bos_id=None, pad_id=0, stop_token_ids=[0])

    def sampling(temperature):
        return Sampling(temperature, config.rollout.top_p, config.rollout.top_k)

    experiment = SimpleNamespace(config=config, layout=None, tokenizer=tokenizer, sampling=sampling)
    with pytest.raises(ValueError, match=message):
        make_served(experiment, None)


def test_two_runs_of_one_name_have_no_folder_of_weights_together(tmp_path):
    anna, bert = (tiny.get_config().run for _ in range(2))
    anna.dir, bert.dir, anna.name, bert.name = str(tmp_path / "anna"), str(tmp_path / "bert"), "one", "one"
    home = _home(str(tmp_path / "weights"), anna)
    assert _home(str(tmp_path / "weights"), anna) == home, "a resumed run, and other processes"
    with pytest.raises(ValueError, match=f"{home} belongs to the run {tmp_path}/anna/one: choose another servers.weig"):
        _home(str(tmp_path / "weights"), bert)
    assert _home(str(tmp_path / "others"), bert) != home


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(token + ord("a")) for token in tokens)


BAD = SimpleNamespace(prompt="bad")


def taught(first=BAD, **changes):
    """What `make_served_teacher` reads of an experiment whose first problem is `first`."""
    config = tiny.get_config()
    config.update_from_flattened_dict({"method": "OPD", "reference.path": "http://127.0.0.1:1", **changes})
    return SimpleNamespace(config=resolve(config), tokenizer=Letters(), task=SimpleNamespace(train=[first]))


@pytest.mark.parametrize("changes", [{"method": "OPD-EXACT"}, {"rollout.temperature": 0.7}])
def test_a_teacher_on_servers_gives_nothing_but_log_probs_at_temperature_1(changes):
    with pytest.raises(ValueError, match="servers give the log-probs of sampled tokens at temperature 1"):
        make_served_teacher(taught(**changes))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["▁b", " a", "d\n"], None),  # blanks differ between servers
        (["b", "z", "d"], "another tokenizer than the policy: token 0 is 'z' there and 'a' here"),
        (["b", "a"], "3 log-probs and 2 texts of 3 tokens"),
    ],
)
def test_a_teacher_on_servers_has_the_policys_tokenizer_or_is_refused(names, message):
    asked = []

    def answer(path, body):
        if body is None:
            return None
        asked.append(body["prompt"])
        return 200, {"choices": [{"logprobs": {"tokens": names, "token_logprobs": [None, -1.0, -2.0]}}]}

    server = StandIn(answer)
    experiment = taught(**{"reference.path": server.url})
    with contextlib.ExitStack() as closing:
        closing.callback(server.end)
        if message is not None:
            closing.enter_context(pytest.raises(ValueError, match=message))
        make_served_teacher(experiment).close()
        assert asked == [[1, 0, 3]]


@pytest.mark.parametrize(("driver", "named"), [("orchestrator", {"model": "t"}), ("servers", {})])
def test_a_teacher_is_asked_about_a_conversation_too_and_by_its_own_name_alone(driver, named):
    asked = []

    def answer(path, body):
        if body is not None:
            asked.append(body)
            return 200, {"choices": [{"logprobs": {"tokens": ["a", "d"], "token_logprobs": [None, -1.0]}}]}

    server = StandIn(answer)
    talk = SimpleNamespace(prompt="", messages=({"role": "user", "content": "ad"},))
    changes = {"reference.path": server.url, "rollout.driver": driver, "servers.model": "t"}
    make_served_teacher(taught(talk, **changes)).close()
    server.end()
    assert [body["prompt"] for body in asked] == [[0, 3]]
    assert {"model": asked[0]["model"]} == named if named else "model" not in asked[0]
