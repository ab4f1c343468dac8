"""The adapter, with a stand-in of the package that calls a client as the package's loop does."""

import asyncio
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rpg_jax.environments.__main__ import main
from rpg_jax.environments.environment import call


class Client:
    def __init__(self, client):
        self.client = client

    async def get_response(self, prompt):
        native, _ = await self.to_native_prompt(prompt)
        return await self.from_native_response(await self.get_native_response(native, "policy", {}, None))


class Count:
    """Asks until the policy says the answer; two turns are right. "rewrite" forgets the first turn."""

    tool_defs = [SimpleNamespace(model_dump=lambda exclude: {"name": "f", "description": "", "parameters": {}})]

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "Say 3"}], "answer": "3", "info": {"a": 1}}]

    async def run_rollout(self, row, client, model, sampling):
        prompt = [SimpleNamespace(model_dump=lambda m=m: m) for m in row["prompt"]]
        for turn in range(1, 5):
            message = (await client.get_response(prompt)).message
            if message.content == row["answer"]:
                return {"reward": float(turn == 2), "error": None}
            if message.content == "fail":
                return {"reward": 0.0, "error": "a broken sandbox"}
            said = {"role": "assistant", "content": message.content}
            told = [{"type": "text", "text": f"{turn}: not {message.content}, {message.tool_calls}"}]
            new = [said, {"role": "tool", "content": told}]
            prompt = [
                *(prompt if message.content != "rewrite" else []),
                *(SimpleNamespace(model_dump=lambda m=m: m) for m in new),
            ]
        return {"reward": 0.25, "error": None}


@pytest.fixture
def library(monkeypatch):
    names = ("verifiers", "verifiers.clients", "verifiers.types")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verifiers"].load_environment = lambda id: {"count": Count}[id]()
    sys.modules["verifiers.clients"].Client = Client
    for name in ("Response", "ResponseMessage", "ToolCall"):
        setattr(sys.modules["verifiers.types"], name, SimpleNamespace)
    yield importlib.import_module("rpg_jax.environments.verifiers_library")
    sys.modules.pop("rpg_jax.environments.verifiers_library", None)


def test_its_problems_are_written_as_rows_and_what_hinders_it_is_one_line(library, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["count", f"--out={out}"]) == 0
    assert [json.loads(line)["question"] for line in out.read_text().splitlines()] == ["Say 3"]
    for wrong, line in {
        f"--out={tmp_path}/nowhere/x": "No such file or directory",
        "--arguments={": "'{' is no JSON",
        "--arguments=[1]": "must be an object",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["count", f"--out={out}", wrong])
        assert ended.value.code == 2 and line in capsys.readouterr().err
    sys.modules.pop("rpg_jax.environments.verifiers_library")
    del sys.modules["verifiers"]
    with pytest.raises(SystemExit):
        main(["count", f"--out={out}"])
    assert "No module named 'verifiers': pip install 'verifiers<0.4'" in capsys.readouterr().err


def test_its_loop_asks_the_policy_and_its_score_is_the_last_turns_reward(library):
    environment = library.Verifiers(id="count")
    [row] = library.rows(environment._environment, "train", "count")
    assert row["question"] == "Say 3" and json.loads(row["answer"])["info"] == {"a": 1}
    posed = {"prompt": "", "question": "", "answer": row["answer"]}

    async def play(*turns):
        messages = (await call(environment, "reset", posed))["messages"]
        for said in turns:
            turn = await call(environment, "step", posed, messages, said)
            messages += [{"role": "assistant", "content": said}, *turn["observation"]]
        return messages, turn

    async def together():
        return await asyncio.gather(play("1", "3"), play("3"), play(*"1245"), play("<tool_call>{}</tool_call>", "5"))

    (first, right), (_, early), (_, never), (_, open_) = asyncio.run(together())
    assert first[0]["tools"][0]["function"]["name"] == "f"
    assert first[2]["role"] == "tool" and first[2]["content"] == "1: not 1, None"
    assert [t["reward"] for t in (right, early, never)] == [1.0, 0.0, 0.25] and right["done"] and early["done"]
    assert open_["observation"][0]["content"] == "2: not 5, None" and len(environment._games) == 1
    for said, line in (("fail", "a broken sandbox"), ("rewrite", "rewrites the conversation")):
        with pytest.raises((RuntimeError, ValueError), match=line):
            asyncio.run(play("1", said))
