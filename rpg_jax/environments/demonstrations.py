"""Conversations with a player who is a plain function: they become demonstrations, and measure a game."""

from collections.abc import Callable, Sequence

from rpg_jax.environments.conversation import Environment, Message, Posed, checked_messages, checked_turn

Player = Callable[[Sequence[str]], str]
"""The next turn of a player, by the observations that he has heard so far."""


def played(
    environment: Environment, problem: Posed, player: Player, *, turns: int
) -> tuple[list[Message], float, list[Message]]:
    """Plays one conversation of at most `turns` turns with an environment whose functions are no coroutines.

    Returns:
      prompt: the messages that open it.
      reward: the sum over its turns.
      conversation: the messages after the prompt; the player's, which are the assistant's, come first and last.
    """
    prompt: list[Message] = [*checked_messages(environment.reset(problem))]
    conversation: list[Message] = []
    heard: list[str] = []
    reward = 0.0
    for left in reversed(range(turns)):
        said = player(heard)
        answer = checked_turn(environment.step(problem, [*prompt, *conversation], said))
        conversation.append({"role": "assistant", "content": said})
        reward += answer["reward"]
        if answer["done"] or not left:
            break
        conversation += answer["observation"]
        heard.append("".join(message["content"] for message in answer["observation"]))
    return prompt, reward, conversation
