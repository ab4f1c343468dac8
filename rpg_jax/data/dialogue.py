"""The texts of completions, for verifiers and for people; a conversation has several turns."""

from collections.abc import Callable, Sequence

from rpg_jax.data.prompts import Problem
from rpg_jax.types import Completion

_OPEN, _CLOSE = "\n<observation>\n", "\n</observation>\n"  # around what an environment said


def shown(completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """A completion as people read it: without stop tokens, and with an environment's words between marks."""
    pieces, at = [], 0
    for first, end in () if completion.turns is None else completion.turns.spans:
        pieces += [decode(completion.tokens[at : first - 1].tolist()), _OPEN]
        pieces += [decode(completion.tokens[first:end].tolist()).strip(), _CLOSE]
        at = end
    return "".join([*pieces, last_turn(completion, decode)])


def opening(problem: Problem) -> str:
    """A problem's prompt as people read it: the messages with which an environment opens, if it has them."""
    messages = [f"{message['role']}: {message['content']}" for message in problem.messages]
    return "\n".join(messages) or problem.prompt


def last_turn(completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """The policy's last turn, without its stop token: what verifiers of texts read. Without turns it is all."""
    spans = () if completion.turns is None else completion.turns.spans
    tokens = completion.tokens[spans[-1][1] if spans else 0 :]
    return decode((tokens if completion.finish_reason == "length" else tokens[:-1]).tolist())


def last_shown(text: str) -> str:
    """The last turn of a text that `shown` has made."""
    return text.rpartition(_CLOSE)[2]
