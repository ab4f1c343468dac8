"""Arithmetic with a calculator that costs: the policy may have an expression worked out before it answers."""

from collections.abc import Sequence

from rpg_jax.environments.conversation import Message, Posed, Turn
from rpg_jax.rewards.expression import evaluate

CALL, UNREADABLE = "calc ", "?"


class Calculator:
    """A turn that begins with `CALL` asks for the value of the expression behind it; any other turn is the answer.

    A call costs `cost` and hears the value, an exact fraction ("7/2") where it is no whole number, or `UNREADABLE`. It
    is parsed, never executed; `rewards.expression.evaluate` has the grammar. The answer ends the conversation. It pays
    1 if it is the problem's, character by character but for blanks around it.
    """

    def __init__(self, cost: float = 0.1):
        self._cost = cost

    def reset(self, problem: Posed) -> Sequence[Message]:
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        if not completion.startswith(CALL):
            return Turn(reward=float(completion.strip() == problem.answer), done=True)
        try:
            heard = str(evaluate(completion.removeprefix(CALL)))
        except ValueError:
            heard = UNREADABLE
        return Turn(heard, -self._cost)
