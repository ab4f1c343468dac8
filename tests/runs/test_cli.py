"""A wrong command line is one line that says what to write instead. A run that would end the same is not restarted."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from etils import epath

from rpg_jax import evaluate
from rpg_jax.runs import cli, run_folder
from rpg_jax.storage.errors import Kind, StorageFailure
from tests.runs.test_run_folder import made

ROOT = Path(__file__).parents[2]


def command():
    parser = cli.parser("train", "Trains.")
    parser.add_config("configs/tiny.py")
    parser.add_argument("--step", type=cli.number(int, 1), help="checkpoint")
    parser.add_argument("--out")
    parser.add_switch("try", help="try")
    return parser


def read(*arguments):
    """The config of a command line of a command with a default."""
    found = []
    assert cli.run(lambda options: found.append(cli.load_config(options)), command(), arguments) == 0
    return found[0]


def told(capsys, *arguments):
    """The error of such a command line."""
    code = cli.run(cli.load_config, command(), arguments)
    said = capsys.readouterr()
    assert code == cli.USAGE_ERROR and not said.out
    return said.err


@pytest.mark.parametrize("file", [[], ["--config=configs/small.py"]], ids=["default", "file"])
def test_an_unknown_field_is_one_line_with_a_file_and_without(capsys, file):
    assert told(capsys, *file, "--config.rollout.slot=3") == (
        "error: no config field 'rollout.slot'; did you mean rollout.slots? --help lists all of them\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stpe=3"], "unknown flag --stpe; did you mean --step? --help lists all flags"),
        (["--configs.seed=3"], "unknown flag --configs.seed; "),
        (["--step=0"], "argument --step: 0 must be at least 1"),
        (["--step=two"], "argument --step: invalid int value: 'two'"),
        (["seed=3"], "unexpected argument 'seed=3'; overrides look like --config.seed=1"),
        (["--config.seed", "3", "4"], "unexpected argument '4'; overrides look like --config.seed=1"),
        (["--config.seed=high"], "flag --config.seed=high: no whole number: 'high'"),
        (["--config.seed=1.5"], "flag --config.seed=1.5: no whole number: '1.5'"),
        (["--config.task.thinking=maybe"], "flag --config.task.thinking=maybe: neither True nor False: 'maybe'"),
        (["--config.run.name=a\udcff"], r"'--config.run.name=a\udcff' is no text in UTF-8"),
        (["--config.optimizer.lr=1e-4"], "no config field 'optimizer.lr'; did you mean optimizer.learning_rate?"),
        (["--config.lr=1e-4"], "no config field 'lr'; did you mean critic.learning_rate or optimizer."),
        (["--config.loss.stiffness=2"], "no config field 'loss.stiffness'; did you mean loss.name, or a key of loss."),
        (["--config.kl_coef=0"], "no config field 'kl_coef'; did you mean loss.kl_coef?"),
        (["--config.fleet.port=9000"], "fleet.port is retired since 2026-11-24: the flag --http_port of rpg_jax.serve"),
        (["--config.run=high"], "no config field 'run'; did you mean run."),
        (["--config=configs/none.py"], "no config file 'configs/none.py'; there are configs/calculator.py, "),
        (["--config="], "no config file ''; there are configs/calculator.py, "),
        (["--config.run.dir=~/r"], "--config.run.dir=~/r: no shell replaces this ~, write --config.run.dir=$HOME/r"),
        (["--out="], "--out is empty: give it a value, or leave it out"),
        (["--config=tinny"], "no config file 'tinny'; did you mean configs/tiny.py?"),
        (["--config=configs/small.py:tiny"], "configs/small.py: it has no variants, leave out ':tiny'"),
        (
            ["--config=configs/qwen3_4b_2k.py:small"],
            "configs/qwen3_4b_2k.py: unknown variant 'small' of a config; known: tiny",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_fix(capsys, arguments, message):
    error = told(capsys, *arguments)
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_an_override_may_follow_its_value_a_space_or_no_and_is_recorded():
    config, file, overrides = read("--config.mesh.fsdp", "-1", "--noconfig.task.reverse", "--config.task.thinking")
    assert (config.mesh.fsdp, config.task.reverse, config.task.thinking) == (-1, False, True)
    assert dict(overrides) == {"mesh.fsdp": -1, "task.reverse": False, "task.thinking": True}
    assert file == "configs/tiny.py" and config.is_locked


def test_help_names_every_choice_and_need_not_wait_for_jax():
    script = "import sys\nfrom rpg_jax.runs.train_command import main\ntry:\n    main()\nfinally:\n"
    script += "    assert not {'jax', 'rpg_jax.losses'} & set(sys.modules), 'imported'"
    done = subprocess.run([sys.executable, "-c", script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "One of token_mean, " in done.stdout, done.stderr


def test_a_switch_is_off_until_it_is_given_and_no_switches_it_off_again():
    for arguments, expected in {
        (): False,
        ("--try", "--notry"): False,
        ("--try=false",): False,
        ("--try",): True,
    }.items():
        assert getattr(command().read(arguments), "try") is expected


def test_a_command_without_a_default_config_takes_overrides_only_with_a_file(capsys):
    parser = cli.parser("serve", "Serves.")
    parser.add_config()
    assert cli.run(lambda options: cli.load_config(options) is not None, parser, []) == 0
    assert cli.run(cli.load_config, parser, ["--config.seed=1"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err == "error: --config.seed=1 needs --config=FILE\n"
    assert evaluate.main(["--run=runs/a", "--config.seed=1"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: a run has its own config: leave --config out, and set --sets")


def test_a_user_error_keeps_its_traceback_with_debug(capsys):
    def fails(options):
        raise ValueError("a number above 1")

    assert cli.run(fails, command(), []) == cli.USAGE_ERROR
    assert capsys.readouterr().err == "error: a number above 1\n"
    with pytest.raises(ValueError, match="above 1"):
        cli.run(fails, command(), ["--debug"])


def test_a_missing_package_is_one_line_and_a_missing_module_of_our_own_a_bug(capsys):
    def needs(name):
        return lambda options: __import__(name)

    assert cli.run(needs("nowhere"), command(), []) == cli.USAGE_ERROR
    assert capsys.readouterr().err == "error: No module named 'nowhere'; pip install 'rpg_jax' brings it\n"
    with pytest.raises(ModuleNotFoundError):
        cli.run(needs("rpg_jax.nowhere"), command(), [])


def test_ctrl_c_is_one_line(capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    assert cli.run(interrupted, command(), []) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_wrong_flag_need_not_wait_for_jax():
    script = "import sys\nfrom rpg_jax.COMMAND import main\ncode = main(['--sep=1'])\n"
    script += "assert not {'jax', 'rpg_jax.losses'} & set(sys.modules), 'imported'\nsys.exit(code)"
    for name in ("bench", "evaluate", "export", "plan", "runs.train_command", "sample", "serve", "sft"):
        command = [sys.executable, "-c", script.replace("COMMAND", name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/r/metrics.jsonl"),
            "No space left on device: /r/metrics.jsonl",
        ),
        (PermissionError(errno.EROFS, "Read-only file system", "/r"), "Read-only file system: /r"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/r/a"), "No such file or directory: /r/a"),
        (
            OSError("/r/checkpoints could not be written: No space left on device"),
            "/r/checkpoints could not be written",
        ),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "[Errno 104] Connection reset by peer"),
    ],
)
def test_a_file_that_fails_is_one_line_and_another_start_may_succeed(capsys, error, said):
    def fail(options):
        raise error

    assert cli.run(fail, command(), []) == cli.FAILED == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {said}") and errors.count("\n") == 1
    with pytest.raises(type(error)):
        cli.run(fail, command(), ["--debug"])


GROWTH = """
import ctypes
from rpg_jax.runs.cli import keep_pages
libc = ctypes.CDLL("libc.so.6")
libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
assert keep_pages()
before = libc.sbrk(0)
while libc.sbrk(0) == before:
    libc.malloc(64 * 1024)
print(libc.sbrk(0) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_heap_grows_by_the_pad():
    grown = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=60)
    assert int(grown.stdout) >= 1 << 27


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error_of_a_command(tmp_path, closed):
    code = "from rpg_jax.runs import cli; cli.sys.exit(cli.run(lambda options: print('done'), cli.parser('x', '')))"
    done = subprocess.run(f'exec "{sys.executable}" -c "{code}" {closed}', shell=True, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_a_full_stdout_is_one_line_that_names_it():
    code = "from rpg_jax.runs import cli; cli.sys.exit(cli.run(lambda options: print('done'), cli.parser('x', '')))"
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device: <stdout>\n")


KEPT = """
import ctypes
from rpg_jax.runs.cli import keep_buffers, keep_pages, return_pages
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
keep_pages(), keep_buffers()
blocks = [libc.malloc(1 << 20) for _ in range(256)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks[:-1]:
    libc.free(block)
before = resident()
assert return_pages()
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_below_a_live_block_goes_back_to_the_system():
    returned = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, timeout=60)
    assert int(returned.stdout) > 200 << 20


UNCOLLECTED = """
import asyncio
from rpg_jax.runs import cli

cli.prepare_process()
of_orbax = {"__name__": "orbax.checkpoint.somewhere"}
exec("async def write(name):\\n    raise ValueError(f'{name} has no space')", of_orbax)


async def own(name):
    raise ValueError(f"{name} is a bug")


async def gathers(write, name):
    asyncio.gather(write(name), write(name))  # nobody awaits it
    await asyncio.sleep(0.01)


asyncio.run(gathers(of_orbax["write"], "array"))
asyncio.run(gathers(own, "server"))
"""


def test_the_arrays_of_a_save_that_fail_after_the_first_are_not_told_again():
    done = subprocess.run([sys.executable, "-c", UNCOLLECTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "server is a bug" in done.stderr and "array has no space" not in done.stderr


MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 10 bytes")
LOST = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:2000")
BUG = KeyError("text")


def test_memory_and_errors_before_the_first_step_end_again_and_faults_from_outside_do_not(tmp_path):
    home = epath.Path(tmp_path)
    for error in (MEMORY, BUG):
        assert cli.ends_again(home, error, stepped=False), error
    assert cli.ends_again(home, MEMORY, stepped=True)
    wrapped = cli.Ended("step 3", cli.FAILED)
    wrapped.__cause__ = OSError(28, "No space left on device")
    full = StorageFailure("checkpoints/4", "No space left on device", Kind.PERMANENT)
    for error in (LOST, wrapped, full, ValueError("no such field"), cli.Ended("not finite", cli.GAVE_UP)):
        assert not cli.ends_again(home, error, stepped=False), error
    assert not (tmp_path / cli.FAILURES).exists()
    judge = cli.Ended("step 1: 9 completions have no verdict", cli.FAILED)  # it may come back
    assert [bool(cli.ends_again(home, judge, stepped=False)) for _ in range(3)] == [False, False, True]


def test_the_third_start_that_ends_with_one_error_after_one_checkpoint_is_the_last(tmp_path):
    home, end = epath.Path(tmp_path), lambda error: cli.ends_again(home, error, stepped=True)
    assert not end(BUG) and not end(BUG)
    assert end(BUG) == "3 starts have ended so after checkpoint 0"
    assert not end(KeyError("another")) and not end(BUG) and not end(BUG)
    (checkpoint := tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (checkpoint / "commit_success.txt").touch()
    assert not end(BUG) and json.loads((tmp_path / cli.FAILURES).read_text(encoding="utf-8"))[0] == 4
    for damaged in ("{half", "5", "[" * 10**5):
        (tmp_path / cli.FAILURES).write_text(damaged, encoding="utf-8")
        assert not end(BUG) and not end(BUG) and end(BUG)


def test_processes_of_one_run_count_their_own_starts(tmp_path, monkeypatch):
    home, found = epath.Path(tmp_path), []
    for _ in range(3):
        for process in range(4):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            found.append(bool(cli.ends_again(home, cli.Ended("no verdict", cli.FAILED), stepped=True)))
    assert found == [False] * 8 + [True] * 4


def test_a_command_ends_with_the_code_that_is_not_restarted_and_keeps_the_traceback(tmp_path, capsys):
    def train(options):
        with run_folder.held(made(tmp_path, "r")):
            raise BUG

    assert cli.run(train, cli.parser("train", ""), []) == cli.GAVE_UP
    said = capsys.readouterr().err
    assert said.endswith("error: 'text'; it took no step, and another start would end the same\n")
    assert "Traceback" in said and not (tmp_path / "r").exists()


def test_what_a_library_leaves_to_the_garbage_is_told_but_for_errors_that_orbax_raises_too(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    cli.prepare_libraries()
    told = []
    monkeypatch.setattr(sys, "__unraisablehook__", lambda caught: told.append(str(caught.exc_value)))
    for module in ("orbax.checkpoint", "mine"):
        scope = {"__name__": module}
        exec("class Read:\n    def __del__(self):\n        raise ValueError(__name__)", scope)
        scope["Read"]()
    assert told == ["mine"]
