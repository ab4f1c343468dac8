"""What an environment is: two functions of a problem and of the conversation so far, and what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, Self

from rpg_jax.rewards.verdicts import BadScore, checked_score

Message = Mapping[str, Any]
"""One message of a chat: {"role": …, "content": …}, both text.

Templates also see `name`, `reasoning_content`, `tool_calls` and `tool_call_id`, and the descriptions of tools under
`tools` of the first message. Any other key is the environment's own, with a value of JSON: `step` finds it again.
"""
ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Posed:
    """A problem as an environment sees it; all text, see `data.Problem`."""

    prompt: str
    answer: str
    question: str
    system: str = ""
    source: str = ""

    @classmethod
    def of(cls, problem: Any) -> Self:
        """The fields that an environment sees of a `data.Problem`."""
        return cls(*(getattr(problem, field.name) for field in dataclasses.fields(cls)))

    @property
    def messages(self) -> list[Message]:
        """The conversation that the problem's own prompt opens."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclasses.dataclass(frozen=True)
class Turn:
    """An environment's answer to one turn of the policy.

    Attributes:
      observation: what the policy reads next: messages, or a text, which is a user's message. "" where `done`.
      reward: of the turn; a completion's reward is the sum over its turns.
      done: the conversation is over, and the policy reads no observation.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Answers the turns of a policy. It is made with the config's `environment.options` as keywords.

    Both functions are pure: equal arguments give equal results, and nothing is kept between two calls. Then it does not
    matter which process runs them, and a process that is killed is replaced by another. Each may be a coroutine.
    """

    def reset(self, problem: Posed) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages of the prompt. The last one is not the assistant's."""
        ...

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn | Awaitable[Turn]:
        """The answer to `completion`, the policy's turn after `messages`, without its stop token."""
        ...


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """`value` as a list of messages; raises BadScore if it is something else, or text that UTF-8 cannot hold."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise BadScore(f"messages are a list, got {type(value).__name__}")
    return [_message(each) for each in value]


def checked_turn(value: Any) -> dict[str, Any]:
    """A turn as {observation, reward, done} of plain JSON; raises BadScore if it is none.

    Its observation is a list of messages, empty where the conversation is over.
    """
    if not isinstance(value, Turn):
        raise BadScore(f"step returns a Turn(observation, reward, done), got {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise BadScore(f"Turn.done is True or False, got {type(value.done).__name__}")
    told = value.observation
    messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
    observation = [] if value.done else checked_messages(messages)
    if not value.done and not observation:
        raise BadScore("a turn that is not done has an observation")
    return {"observation": observation, "reward": checked_score(value.reward), "done": value.done}


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadScore(f"a message is a dict with role and content, got {type(value).__name__}")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise BadScore(f"a message has a role of {', '.join(ROLES)} and a text as content, got {role!r:.40}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise BadScore(f"a message that is no text: {error.reason} at character {error.start}") from error
    return dict(value)
