"""A run whose next start would end the same is not started again; storage and lost processes are tried again."""

import json

import jax

from rpg_jax import storage
from rpg_jax.runs import cli, failures, run_folder
from rpg_jax.storage.errors import Kind, StorageFailure
from tests.runs.test_run_folder import made

MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 10 bytes")
LOST = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:2000")
BUG = KeyError("text")


def test_memory_and_errors_before_the_first_step_end_again_and_faults_from_outside_do_not(tmp_path):
    folder = storage.Folder(tmp_path)
    for error in (MEMORY, BUG):
        assert failures.ends_again(folder, error, stepped=False), error
    assert failures.ends_again(folder, MEMORY, stepped=True)
    wrapped = cli.Ended("step 3", cli.FAILED)
    wrapped.__cause__ = OSError(28, "No space left on device")
    full = StorageFailure("checkpoints/4", "No space left on device", Kind.PERMANENT)
    for error in (LOST, wrapped, full, ValueError("no such field"), cli.Ended("not finite", cli.GAVE_UP)):
        assert not failures.ends_again(folder, error, stepped=False), error
    assert not (tmp_path / failures.NOTE).exists()
    judge = cli.Ended("step 1: 9 completions have no verdict", cli.FAILED)  # it may come back
    assert [bool(failures.ends_again(folder, judge, stepped=False)) for _ in range(3)] == [False, False, True]


def test_the_third_start_that_ends_with_one_error_after_one_checkpoint_is_the_last(tmp_path):
    folder, end = storage.Folder(tmp_path), lambda error: failures.ends_again(folder, error, stepped=True)
    assert not end(BUG) and not end(BUG)
    assert end(BUG) == "3 starts have ended so after checkpoint 0"
    assert not end(KeyError("another")) and not end(BUG) and not end(BUG)
    (checkpoint := tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (checkpoint / "commit_success.txt").touch()
    assert not end(BUG) and json.loads((tmp_path / failures.NOTE).read_text(encoding="utf-8"))[0] == 4
    (tmp_path / failures.NOTE).write_text("{half", encoding="utf-8")
    assert not end(BUG) and not end(BUG) and end(BUG)


def test_a_command_ends_with_the_code_that_is_not_restarted_and_keeps_the_traceback(tmp_path, capsys):
    def train(options):
        with run_folder.held(made(tmp_path, "r")):
            raise BUG

    assert cli.run(train, cli.parser("train", ""), []) == cli.GAVE_UP
    said = capsys.readouterr().err
    assert said.endswith("error: 'text'; it took no step, and another start would end the same\n")
    assert "Traceback" in said and not (tmp_path / "r").exists()
