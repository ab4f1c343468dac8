"""The environment that docs/environments.md writes in twenty lines is one, and its options are taken."""

import re
from pathlib import Path

from rpg_jax.environments import Posed
from rpg_jax.environments.environment import Declaration

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def test_the_twenty_lines_of_the_page_play(tmp_path, monkeypatch):
    code = re.search(r"```python\n# again.py\n(.*?)```", PAGE, re.DOTALL)[1]
    assert len(code.splitlines()) <= 20
    (tmp_path / "page_again.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = Declaration("page_again:Again").make({"cost": 0.2})
    posed = Posed("1+1?", "2", "1+1?")
    assert environment.reset(posed) == [{"role": "user", "content": "1+1?"}]
    turn = environment.step(posed, [], "so #3")
    assert (turn.observation, turn.reward, turn.done) == ("No, it is not 3. Try again.", -0.2, False)
    assert environment.step(posed, [], "#2").reward == 1.0
