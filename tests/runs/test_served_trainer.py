"""What a trainer with servers refuses before it asks any."""

from types import SimpleNamespace

import pytest

from configs import tiny
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.served_trainer import make_served
from rpg_jax.types import Sampling

URLS = {"servers.urls": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "needs different addresses in servers.urls, got ''"),
        ({"servers.urls": "http://h:1, http://h:1"}, "needs different addresses in servers.urls"),
        ({"servers.urls": "h:1"}, "the server's address 'h:1' is not of the form http://HOST:PORT"),
        (URLS, "needs servers.weights, a folder that the servers see too"),
        (URLS | {"servers.weights": "gs://b/w"}, "'gs://b/w' is no local folder"),
        (URLS | {"rollout.int8": True}, "int8 and int8_kv are the servers' own choice"),
        (URLS | {"rollout.devices": 1}, "needs rollout.devices=0"),
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
