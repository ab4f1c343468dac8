"""Text that others wrote reaches a terminal, a page of Markdown and a page of HTML as text."""

import ast
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from rpg_jax.report import scores, screen, summary
from rpg_jax.report.run_files import Run

ROOT = Path(__file__).parents[2]
TITLE, CLIPBOARD, UP, C1 = "\x1b]0;owned\x07", "\x1b]52;c;cm0=\x07", "\x1b[2A\x1b[2K", "\x9b31m"
HOSTILE = f"{TITLE}{CLIPBOARD}{UP}{C1}\rnew\b\u202e[link=http://evil.example]<img src=x onerror=alert(1)>`[a](b)|"
RAW = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80\xae")


def run(code_or_module, *arguments, env=None, code=0):
    """stdout and stderr, as bytes, of a program with a hostile text in its arguments."""
    command = ["-m", code_or_module] if code_or_module.startswith("rpg_jax") else ["-c", code_or_module]
    asked = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"} | (env or {})
    done = subprocess.run([sys.executable, *command, *arguments], capture_output=True, env=asked, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


GUARDED = """
import sys, warnings
from rpg_jax.report import screen
screen.guard()
text = sys.argv[1].encode().decode("unicode_escape")
print(text)
print("note:", text, file=sys.stderr)
sys.stderr.write(text)
warnings.warn(text)
from rich.table import Table
table = Table("a", title=text); table.add_row(text)
screen.console().print(table, text)
screen.console(sys.stderr).print(text)
print("in order")
raise RuntimeError(text)
"""


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "latin-1"])
def test_a_guarded_process_writes_no_control_character_in_any_locale(locale):
    encoding = {"C": "ascii", "latin-1": "latin-1"}.get(locale, "utf-8")
    hostile = (HOSTILE + "→é").encode("unicode_escape").decode()
    printed = run(GUARDED, hostile, env={"PYTHONIOENCODING": encoding}, code=1)
    assert not RAW.search(printed)
    assert b"\\x1b]0;owned" in printed and b"[link=http://evil.example]" in printed
    assert printed.index(b"in order") > printed.index(b"evil.example")
    assert (b"\\u2192" in printed) == (encoding != "utf-8")


def test_the_bar_of_a_library_may_go_back_to_the_start_of_its_line_and_nothing_else_may():
    bar = "import sys; from rpg_jax.report import screen; screen.guard(); "
    assert run(bar + r"sys.stderr.write('\r 7%'); sys.stderr.write('a\rb')") == b"\r 7%a\\rb"
    assert run(bar + r"print('\rb', sys.stdout.isatty())") == b"\\rb False\n"


def test_colours_of_the_console_are_its_own():
    stream = io.StringIO()
    stream.isatty = lambda: True
    console = screen.console(stream)
    console.print(Table(HOSTILE), HOSTILE)
    console.print(HOSTILE, style="red")
    assert not re.search("\x1b(?!\\[[0-9;]*m)|\x07|\x9b|\r|\b|\u202e", stream.getvalue())


@pytest.mark.parametrize("column", ["question", "answer", "source", "demonstration"])
def test_rows_of_data_are_shown_as_text(tmp_path, column):
    row = {"question": "1+1=", "answer": "2", "source": "s", column: HOSTILE}
    (file := tmp_path / "rows.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({HOSTILE: 1}) + "\n", encoding="utf-8"
    )
    printed = run("rpg_jax.data", "inspect", str(file))
    assert not RAW.search(printed) and b"evil.example" in printed


def hostile_run(folder):
    folder.mkdir()
    metrics = {"step": 1, f"eval/{HOSTILE}/mean_at_k": 0.5, f"eval/{HOSTILE}/pass_at_k": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps({"method": HOSTILE, "loss": {"name": HOSTILE}, "seed": 0}), encoding="utf-8"
    )
    return folder


def test_a_run_is_reported_as_text(tmp_path):
    folder = hostile_run(tmp_path / "r")
    printed = run("rpg_jax.report", str(folder))
    assert not RAW.search(printed) and b"evil.example" in printed
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and "onerror=alert(1)&gt;" in page
    assert not RAW.search((folder / "summary.md").read_bytes())


def rendered(markdown):
    """The HTML of a page, as CommonMark with tables has it."""
    return pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").render(markdown)


@pytest.mark.parametrize("name", ["summary", "scores"])
def test_a_page_of_markdown_has_no_markup_of_others(tmp_path, name):
    if name == "summary":
        page = summary.write_summary(Run.read(hostile_run(tmp_path / "r"))).read_text(encoding="utf-8")
    else:
        record = {
            "set": HOSTILE,
            "prompt_id": 0,
            "index": 0,
            "prompt": HOSTILE,
            "reference": HOSTILE,
            "answer": HOSTILE,
        }
        record |= {"verdict": "wrong", "reward": 0.0, "tokens": 1, "finish_reason": "stop", "completion": HOSTILE}
        by_set = {HOSTILE: scores.summarise([record])}
        page = scores.markdown(HOSTILE, {"policy": HOSTILE}, by_set)
    assert not RAW.search(page.encode())
    html = rendered(page)
    assert "<img" not in html and 'href="b"' not in html and "onerror=alert(1)&gt;" in html


def test_every_command_guards_its_screen_and_nobody_writes_past_it():
    """Streams are guarded once, in `cli.prepare_process` and in the two commands without it."""
    for path in (ROOT / "rpg_jax").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if path.name != "screen.py":
                past = re.fullmatch(
                    r"Console|rich\.print|rich\.get_console|sys\.std(out|err)\.buffer\..*|os\.write", name
                )
                allowed = name == "os.write" and path.name == "pool.py"  # into the pipe of a verifier
                assert not past or allowed, f"{path}:{node.lineno} {name}"
                assert name != "Progress" or "rich.progress" not in text or "console=" in ast.unparse(node)
        piped = ("verifier_process.py", "chat.py")  # their standard output is a pipe to this package
        command = "if __name__ ==" in text and path.name not in (*piped, "docs.py", "train.py")
        assert not command or "cli.run(" in text or "screen.guard()" in text or "prepare_process()" in text, path
    assert "screen.guard()" in (ROOT / "rpg_jax/runs/cli.py").read_text(encoding="utf-8")


def test_a_hostile_argument_of_reproduce_reaches_no_terminal():
    printed = run("rpg_jax.reproduce", f"--from-data={HOSTILE.replace('/', '')}", code=2)
    assert b"no data in \\x1b]0;owned" in printed
    assert not RAW.search(printed)


@pytest.mark.parametrize("columns", ["0", "1", "-5", "abc"])
def test_a_table_is_shown_whatever_the_environment_says_of_the_screen(tmp_path, columns):
    (file := tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', encoding="utf-8")
    assert b"problem 0" in run("rpg_jax.data", "inspect", str(file), env={"COLUMNS": columns})


def test_the_markup_of_rich_in_a_row_is_text(tmp_path):
    row = {"question": "q", "answer": "2", "source": "[link=file:///etc/passwd]x[/link] [/never opened] :skull:"}
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    printed = run("rpg_jax.data", "inspect", str(file))
    assert b"[link=file:///etc/passwd]x[/link] [/never opened] :skull:" in printed
