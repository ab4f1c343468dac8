"""Another library answers in a process of its own, in turn with ours."""

import json

import pytest

from experiments.peers import __main__ as peers
from experiments.peers.opponent import Opponent


@pytest.mark.slow  # a benchmark
def test_a_rollout_puts_both_peers_beside_every_driver(capsys, tmp_path):
    python = tmp_path / "python"
    answer = '{\\"seconds\\": 3, \\"tokens\\": 2560}'
    python.write_text(f'#!/bin/sh\nread sizes\nwhile read again; do echo "{answer}"; done\n', encoding="utf-8")
    python.chmod(0o755)
    pythons = [f"--against={python}", f"--against-tunix={python}"]
    assert peers.main(["rollout", "--preset=tiny", "--repeats=2", "--json", *pythons]) == 0
    result = json.loads(capsys.readouterr().out)
    for peer in ("hf", "tunix"):
        assert result[f"{peer}_seconds"] == 3 and result[f"{peer}_tokens_per_s"] == pytest.approx(2560 / 3)
        for prefix in ("", "lockstep_"):
            assert result[f"{prefix}of_{peer}"] == pytest.approx(3 / result[f"{prefix}seconds"])


def test_a_rollout_without_a_peer_says_what_is_missing(capsys):
    assert peers.main(["rollout", "--preset=tiny"]) == 2
    assert "no peer: give --against=PYTHON or --against-tunix=PYTHON" in capsys.readouterr().err


def test_an_opponent_answers_once_before_it_is_asked_and_once_for_every_question(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nread sizes\nwhile read question; do echo "$sizes"; done\n', encoding="utf-8")
    python.chmod(0o755)
    opponent = Opponent(str(python), "torch_step.py", {"rows": 3})
    assert opponent.first["rows"] == opponent.work()["rows"] == 3
    opponent.close()


def test_an_interpreter_that_cannot_be_the_opponent_is_an_error_with_its_name():
    with pytest.raises(ValueError, match="--against=no/such/python: "):
        Opponent("no/such/python", "torch_step.py", {})
    with pytest.raises(ValueError, match="false gave no answer: see its message above; has it the peer's packages"):
        Opponent("false", "torch_step.py", {})
