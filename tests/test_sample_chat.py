"""A person is the policy of an environment."""

from configs import tiny
from rpg_jax.runs.resolve import resolve
from rpg_jax.sample import play

GAME = """
from rpg_jax.environments import Turn

class Again:
    def reset(self, problem):
        return [{"role": "user", "content": f"{problem.prompt} ?"}]

    def step(self, problem, messages, completion):
        if completion == "bad":
            return 1
        right = completion == problem.answer
        return Turn("" if right else f"not {completion}", 1.0 if right else -0.5, right)
"""


def played(tmp_path, monkeypatch, capsys, *lines):
    (tmp_path / "again_game.py").write_text(GAME, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny.get_config()
    changes = {"name": "again_game:Again", "in_process": True, "max_turns": 3}
    config.update_from_flattened_dict({f"environment.{name}": value for name, value in changes.items()})
    said = iter(lines)
    play(resolve(config), 0, lambda _: next(said, ""))
    return capsys.readouterr().out.splitlines()


def test_turns_are_shown_and_paid_until_the_end_the_limit_or_an_empty_line(tmp_path, monkeypatch, capsys):
    first, *_, last = played(tmp_path, monkeypatch, capsys)
    assert first.endswith("= ?") and last.startswith("turns 0, reward 0, reference answer '")
    answer = last.split("'")[1]
    assert played(tmp_path, monkeypatch, capsys, "x", answer, "y")[1:] == [
        "reward -0.5",
        "[user] not x",
        "reward 1",
        f"turns 2, reward 0.5, reference answer '{answer}'",
    ]
    assert played(tmp_path, monkeypatch, capsys, *"xxxx")[-1].startswith("turns 3, reward -1.5")
    assert "the environment failed: value (step returns a Turn" in played(tmp_path, monkeypatch, capsys, "bad")[-1]
