"""Problems that are solved with tools: the policy calls them, reads the results, and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.environments.conversation import Message, Posed, Turn
from rpg_jax.environments.tool_calls import parse
from rpg_jax.environments.tools import answer, make_tool
from rpg_jax.rewards.verifiers import BY_SOURCE, VERIFIERS, name_for_source, resolve

_DEFAULT: Mapping[str, Mapping[str, Any]] = {"calculator": {}}


class ToolUse:
    """A turn with tool calls is answered by their results; the first turn without one is the answer, and verified.

    The tools stand in the system turn, calls and results in the form of the model's chat template (Qwen's). The policy
    reads an error as the result of a call that cannot be made.

    Args:
      tools: options by the name of a tool, see `tools.make_tool`.
      verifier: judges the answer without thoughts, as in `rewards.parts`: one of `VERIFIERS`, "by_source" or
        "module:function". Its score is the reward of the last turn.
      cost: the reward of each call is -cost.

    Raises:
      ValueError: there is no such tool or verifier, or the verifier asks a server.
    """

    def __init__(
        self, *, tools: Mapping[str, Mapping[str, Any]] = _DEFAULT, verifier: str = "exact", cost: float = 0.0
    ):
        made = [make_tool(name, options) for name, options in tools.items()]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in made)}")
        found = None if verifier == BY_SOURCE else resolve(verifier)
        if verifier != BY_SOURCE and (found is None or found.remote or found.played):
            raise ValueError(f"unknown verifier {verifier!r} of an answer; known: {', '.join([*VERIFIERS, BY_SOURCE])}")
        self._verifier, self._cost = found, float(cost)

    def reset(self, problem: Posed) -> Sequence[Message]:
        first, *others = problem.messages
        return [{**first, "tools": [tool.description for tool in self._tools.values()]}, *others]

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        said = parse(completion)
        if not said.calls:
            return Turn("", self._score(problem, said.text), True)
        results = [{"role": "tool", "content": answer(self._tools, call)} for call in said.calls]
        return Turn(results, -self._cost * len(said.calls))

    def _score(self, problem: Posed, text: str) -> float:
        verifier = self._verifier or VERIFIERS[name_for_source(problem.source)]
        seen = (problem.prompt,) if verifier.sees_prompt else ()
        return float(verifier.load()(text, problem.answer, *seen))
