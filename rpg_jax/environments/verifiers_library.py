"""Environments of the package verifiers (Prime Intellect): its own loop runs, and the policy here answers its requests.

Tested with verifiers 0.1.14 and 0.3.1. Version 0.4 no longer has these environments.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from rpg_jax.environments.environment import Message, Posed, Turn
from rpg_jax.environments.tools import parse
from rpg_jax.rewards.callables import load

_GAME = "verifiers_game"  # the key of an observation that says which conversation it belongs to
_MOST_GAMES = 4096  # conversations that a length limit ended are forgotten beyond it


class Verifiers:
    """Plays the environments that `verifiers.load_environment` knows, in the trainer's process: they keep state.

    The answer of a problem is the JSON of a row of the environment's data set, see `rows`. The environment's score of
    the conversation is the reward of its last turn. A conversation that a limit here ends before the environment does
    has no score: give `environment.max_turns` at least its number of turns.

    Args:
      id: of an installed environment, or "module:name" of a class or function that makes one.
      arguments: its keywords.
    """

    def __init__(self, *, id: str, arguments: Mapping[str, Any] | None = None):
        self._environment = open_environment(id, arguments or {})
        tools = self._environment.tool_defs or []
        self._tools = [{"type": "function", "function": tool.model_dump(exclude={"strict"})} for tool in tools]
        self._games: dict[str, _Game] = {}

    def reset(self, problem: Posed) -> Sequence[Message]:
        first, *others = [_plain(message) for message in json.loads(problem.answer)["prompt"]]
        return [{**first, "tools": self._tools} if self._tools else first, *others]

    async def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        name = next((m[_GAME] for m in messages if _GAME in m), None) or uuid.uuid4().hex
        game = self._games.pop(name, None)
        if game is None:
            game = _Game(self._environment, json.loads(problem.answer))
        try:
            observed = await game.answer(completion)
        except BaseException:  # a deadline too
            game.stop()
            raise
        if observed is None:
            return Turn("", game.reward(), True)
        self._games[name] = game
        if len(self._games) > _MOST_GAMES:
            self._games.pop(next(iter(self._games))).stop()
        return Turn([{**message, _GAME: name} for message in observed])


def open_environment(id: str, arguments: Mapping[str, Any]) -> Any:
    """The environment. Raises ValueError if it is of a kind without turns of its own."""
    made = load(id, "environment")(**arguments) if ":" in id else vf.load_environment(id, **arguments)
    if not hasattr(made, "run_rollout"):
        raise ValueError(f"{id}: {type(made).__name__} has no run_rollout; it is no environment of verifiers below 0.4")
    return made


def rows(environment: Any, split: str, name: str) -> Iterator[dict[str, str]]:
    """The rows of its data set, "train" or "eval", as problems: the answer is the whole row, as JSON."""
    found = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    for row in found:
        said = [_plain(message)["content"] for message in row["prompt"] if message["role"] == "user"]
        yield {"question": said[-1], "answer": json.dumps(row), "source": f"verifiers/{name}"}


class _Game:
    """One conversation: the environment's loop in a task, which waits for the policy where it would ask a model."""

    def __init__(self, environment: Any, row: Mapping[str, Any]):
        self._asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._known = -1  # messages of the last request; -1 before the first
        self._task = asyncio.ensure_future(environment.run_rollout(row, _Policy(self), "policy", {}))

    async def answer(self, completion: str) -> list[dict[str, Any]] | None:
        """Hands the policy's turn to the environment; returns the environment's next messages, or None at the end.

        Raises ValueError if the environment ended before the first turn, or changed earlier messages.
        """
        if self._known < 0 and await self._request() is None:
            raise ValueError("the environment ended before the first turn")
        self._said.put_nowait(completion)
        before = self._known
        asked = await self._request()
        if asked is None:
            return None
        if len(asked) < before + 2:
            raise ValueError("the environment rewrites the conversation, which only grows here")
        return [_plain(message) for message in asked[before + 1 :]]

    async def respond(self, prompt: list[Any]) -> str:
        """Called in place of a model."""
        self._asked.put_nowait(prompt)
        return await self._said.get()

    def reward(self) -> float:
        """The score. Raises RuntimeError for a failure of the environment."""
        output = self._task.result()
        if error := output.get("error"):
            raise RuntimeError(str(error)[:200])
        return float(output["reward"])

    def stop(self) -> None:
        self._task.cancel()

    async def _request(self) -> list[Any] | None:
        waiting = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return None
            asked = waiting.result()
            self._known = len(asked)
            return asked
        finally:
            waiting.cancel()


class _Policy(Client):
    """A client that asks the policy of a `_Game` in place of a server."""

    _numbers = itertools.count()

    def __init__(self, game: _Game):
        super().__init__(game)

    def setup_client(self, config: Any) -> Any:
        return config  # the game is the client

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict]:
        return list(messages), {}

    async def get_native_response(self, prompt: Any, *args: Any, **kwargs: Any) -> str:
        return await self.client.respond(prompt)

    async def raise_from_native_response(self, response: Any) -> None:
        pass

    async def from_native_response(self, response: str) -> Response:
        (text, written), number = parse(response), next(self._numbers)
        calls = [
            ToolCall(id=f"call_{number}_{i}", name=call.name, arguments=json.dumps(call.arguments))
            for i, call in enumerate(written)
            if call.error is None
        ]
        message = ResponseMessage(
            content=text if calls else response,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id=f"turn_{number}", created=0, model="policy", message=message)

    async def close(self) -> None:
        pass


def _plain(message: Any) -> dict[str, Any]:
    """A message of the library, a dict or an object, with its content as text."""
    given = message if isinstance(message, Mapping) else message.model_dump()
    content = given["content"] or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return {"role": given["role"], "content": content}
