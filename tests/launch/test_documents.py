"""Every command in README.md and docs/ can be given: its program, flags and config fields exist. Each is executed by a
test, or a table says why not. Every link and every path of a page leads somewhere, and docs/README.md links every page.

The commands and paths of docs/log are left out: they are those of their dates.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from rpg_jax import losses
from rpg_jax.runs import config_files
from rpg_jax.runs.resolve import resolve

ROOT = Path(__file__).parents[2]
PROGRAMMES = sorted((ROOT / "experiments").rglob("README.md"))
PAGES = sorted((ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *PROGRAMMES))
LINKED = sorted((ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")))
DATED = {page for page in LINKED if page.parent.name == "log"}
FENCE = re.compile(r"^```(?:sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)  # of any language
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w./-])(?:rpg_jax|experiments|configs|launch|tests|docs)/[\w./-]*[\w/]")
INLINE = re.compile(r"`((?:\.venv/bin/)?python -m (?:rpg_jax|experiments|launch)\.\w+[^`]*)`")
MAKERS = ("extending.md", "own_data.md")  # pages that make files
PROGRAMS = ("python", ".venv/bin/python", "bash", "launch/tpu", "launch/xpk")

# What runs a command, by how it begins: the first that fits. A file of tests, or why no test runs it.
EXECUTED = {
    "launch/": "tests/launch/test_documents.py",
    "bash launch/local.sh --help": "tests/end_to_end/test_train.py",
    "bash launch/": "not run: installs an environment, then what tests/end_to_end and every test do",
    "python words.py": "tests/test_extending.py",
    "python rows.py": "tests/end_to_end/test_sft.py",
    "python -m rpg_jax.sft": "tests/end_to_end/test_sft.py",
    "python -c ": "not run: says what the machine has",
    "python -m pytest": "tests/test_extending.py",
    "python -m rpg_jax.train": "tests/end_to_end/test_train.py",
    "python -m rpg_jax.evaluate --folder": "not run: needs published weights",
    "python -m rpg_jax.evaluate": "tests/end_to_end/test_evaluate.py",
    "python -m rpg_jax.export": "tests/test_export.py",
    "python -m rpg_jax.serve": "tests/test_serve.py",
    "python -m rpg_jax.sample": "tests/test_sample.py",
    "python -m rpg_jax.report": "tests/report/test_report.py",
    "python -m launch.pretrained": "tests/launch/test_pretrained.py",
    "python -m rpg_jax.data": "tests/data/test_prepare.py",
    "python -m docs.generate": "tests/test_docs.py",
    "python -m experiments.estimators": "tests/experiments/test_estimators.py",
    "python -m experiments.objective": "tests/experiments/test_objective.py",
    "python -m experiments.pretrained": "tests/experiments/test_pretrained.py",
    "python -m experiments.peers": "tests/experiments/test_peers.py",
    "python -m rpg_jax.reproduce": "tests/reproduction/test_run_tables.py",
    "python -m rpg_jax.bench": "tests/test_bench.py",
    "python -m launch.first_hour": "tests/launch/test_first_hour.py",
    "python -m rpg_jax.plan --config=configs/qwen3_1p7b_gsm8k_lora": "tests/planning/test_estimates.py",  # --beside
    "python -m rpg_jax.plan --config=configs/qwen3_4b_2k_lora": "tests/planning/test_estimates.py",
    "python -m rpg_jax.plan --config=configs/qwen": "not run: compiles for minutes; docs/plan.md has what it printed",
    "python -m rpg_jax.plan": "tests/planning/test_run_plan.py",
}


def commands(page: Path) -> list[str]:
    """The commands of a page's fenced blocks and those in its sentences, without what is said about them."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in lines]  # variables of the environment
    lines = [re.sub(r"^rpg-(\w+)", r"python -m rpg_jax.\1", line) for line in lines]  # commands of a wheel
    fenced = [re.sub(r"\s+# .*", "", line) for line in lines if line.split(" ")[0] in PROGRAMS]
    return fenced + [" ".join(found.split()) for found in INLINE.findall(BLOCK.sub("", text))]


COMMANDS = [(page.name, line) for page in PAGES for line in commands(page)]
LAUNCHERS = [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for _, line in COMMANDS if line.startswith("launch/")]


def flags_of(module: str, command: str = "") -> set[str]:
    """The flags that a command's source declares."""
    module = module.replace(".", "/")
    files = [ROOT / "rpg_jax" / f"{module}.py", ROOT / "rpg_jax" / module / "__main__.py", ROOT / f"{module}.py"]
    files += [ROOT / module / "__main__.py", ROOT / "experiments/kept.py"] if module.startswith("experiments/") else []
    parts = (f"measure_{command}", "subject") if module in ("bench", "experiments/peers") else ()
    files += [ROOT / "rpg_jax" / "benchmarks" / f"{name}.py" for name in parts]
    files += [ROOT / "rpg_jax/runs/train_command.py"] if module == "train" else []
    found = {"help", "debug"}
    for file in filter(Path.exists, files):
        for call in (
            node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
        ):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in ("add_argument", "add_switch"):
                found |= {a.removeprefix("--") for a in map(_text, call.args) if a}
            found |= {name.removeprefix("add_")} if name in ("add_config", "add_beside") else set()
    return found


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def check_overrides(arguments: list[str]) -> None:
    """The config of a command resolves with the command's overrides in it."""
    file = next((a.partition("=")[2] for a in arguments if a.startswith("--config=")), "configs/tiny.py")
    path, _, variant = file.partition(":")
    path = path if "/" in path or path.endswith(".py") else f"configs/{path}.py"
    made = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in MAKERS)
    if f"# {path}\n" in made:  # a file that the page makes
        path = "configs/tiny.py"
    assert (ROOT / path).exists(), path
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    config = module.get_config(*[variant] * bool(variant))
    known = config_files.fields()
    for argument in (a for a in arguments if a.startswith("--config.")):
        name, value = argument.removeprefix("--config.").split("=", 1)
        assert name in known, f"no config field {name}"
        if name == "method" and f'"{value}": regularized(' not in made:
            config.method = value
    assert config.method in losses.METHODS
    resolve(config)


@pytest.mark.parametrize("page, line", COMMANDS, ids=lambda value: value[:60])
def test_what_a_documented_command_names_exists(page, line):
    words = shlex.split(line)
    if words[0] == "bash" or words[0].startswith("launch/"):
        assert (ROOT / words[words[0] == "bash"]).exists()
        if "local.sh" in line:
            check_overrides(words[2:])
        return
    if words[1] == "-c":
        compile(words[2], page, "exec")
        return
    if words[1:3] == ["-m", "pytest"] or words[1] != "-m":
        assert page in MAKERS, "only these pages make files"
        return
    module, arguments = words[2].removeprefix("rpg_jax."), words[3:]
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    known = flags_of(module, next((a for a in arguments if not a.startswith("-")), ""))
    for argument in arguments[:separator]:
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and not name.startswith("config."):
            assert name in known, f"{words[2]} has no flag --{name}; it has {sorted(known)}"
    check_overrides(arguments)


@pytest.mark.parametrize("page, line", COMMANDS, ids=lambda value: value[:60])
def test_a_documented_command_is_executed_by_a_test_or_says_why_not(page, line):
    line = line.removeprefix(".venv/bin/")
    how = next((how for start, how in EXECUTED.items() if line.startswith(start)), None)
    assert how, f"{page}: say in EXECUTED which test runs {line!r}, or why none does"
    if page == "extending.md" and f"\n{line}\n" in (ROOT / "docs" / page).read_text(encoding="utf-8"):
        return  # tests/test_extending.py runs its blocks, whatever they are
    assert how.startswith("not run: ") or (ROOT / how).exists()
    if (found := re.search(r"-m (?:rpg_jax|experiments|launch)\.(\w+)", line)) and not how.startswith("not run: "):
        assert found[1] in (ROOT / how).read_text(encoding="utf-8"), f"{how} does not run {found[1]}"


@pytest.mark.parametrize("program, line", LAUNCHERS, ids=lambda value: value[:40])
def test_documented_commands_run_dry(cloud, program, line):
    needs = "--type=v5p-16 --zone=us-east5-a --bucket=gs://mine"
    first = line.replace("--name", f"{needs} --name", 1) if "--type" not in line else line
    if "--dry-run" not in line:
        first = first.replace(" ", " --dry-run ", 1)
    assert cloud.run(first, program.removeprefix("launch/")) == 0, cloud.err
    assert cloud.out and not cloud.calls


def test_the_documents_show_commands():
    assert len(LAUNCHERS) >= 8 and len(COMMANDS) >= 30


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*LINKED, *PROGRAMMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@pytest.mark.parametrize("page", sorted({*LINKED, *PROGRAMMES} - DATED), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    made = set(re.findall(r"^```python\n# ([\w./]+)$", text, re.MULTILINE))  # by the page itself
    missing = [path for path in PATH.findall(text) if path not in made and not (ROOT / path).exists()]
    assert not missing


def test_every_page_that_the_code_names_exists():
    for folder in ("rpg_jax", "experiments", "configs", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w./-]+\.(?:md|png)", file.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{file.relative_to(ROOT)} names {name}"


def test_the_index_of_the_documents_links_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))
    }
    assert {*LINKED} - linked == {index}


def test_every_difference_in_errata_names_tests_that_exist():
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    for number, shown in rows:
        assert "`test_" in shown, f"row {number} names no test"
        for file, names in re.findall(r"`(test_\w+)`(?:: ((?:`[^`]+`(?:, )?)+))?", shown):
            source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"{file}.py"))
            if not source:  # a test named without its file belongs to the file before it
                source = "".join(
                    path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "losses").glob("test_*.py")
                )
                names = f"`{file}`"
            for name in re.findall(r"`([^`]+)`", names):
                for part in filter(None, re.split("…", name)):
                    assert part.strip("_ ") in source, f"row {number}: no {name} in {file}"
