"""Imports point down: the layers of the package, read from its source without importing it."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "rpg_jax"

LAYERS = (
    {"types", "masking"},
    {"losses", "parallel"},
    {"storage"},
    {"models", "data", "rewards"},
    {"rollout"},
    {"environments"},
    {"training", "report"},
    {"runs"},
    {"planning", "reproduction"},
    {"benchmarks"},
)
COMMANDS = {"bench", "evaluate", "export", "plan", "reproduce", "sample", "serve", "sft", "train"}
ENTRY_POINTS = len(LAYERS)  # every other module directly under rpg_jax/
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

FILES = sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def part(module: str) -> str:
    """The package or file directly under rpg_jax that a module belongs to ("" for rpg_jax itself)."""
    return (module.split(".") + [""])[1]


def layer(module: str) -> int:
    if module.endswith(".__main__"):
        return ENTRY_POINTS
    return LAYER.get(part(module), ENTRY_POINTS)


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of everything a file imports, inside functions too; relative names resolved."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            inside = source.split(".")[0] == PACKAGE
            found += [(f"{source}.{alias.name}" if inside else source, node.lineno) for alias in node.names]
    return found


def own_imports(path: Path) -> list[tuple[str, int]]:
    """The modules of rpg_jax that a file imports; `from rpg_jax.losses import methods` means rpg_jax.losses.methods."""
    found = []
    for name, line in imports(path):
        while name.split(".")[0] == PACKAGE and name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and name != module_name(path):
            found.append((name, line))
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    here = module_name(path)
    for name, line in own_imports(path):
        if name == PACKAGE or part(name) == part(here) or layer(name) == layer(here) == ENTRY_POINTS:
            continue
        assert layer(name) < layer(here), f"{path}:{line} (layer {layer(here)}) imports {name} (layer {layer(name)})"


def test_no_import_cycle():
    graph = {module_name(path): {name for name, _ in own_imports(path)} for path in FILES}
    done, open_ = set(), []

    def visit(module):
        assert module not in open_, " -> ".join([*open_[open_.index(module) :], module])
        if module in done:
            return
        open_.append(module)
        for name in sorted(graph[module]):
            # a package's __init__ imports its modules; a module naming its own package is resolved by then
            if not (part(name) == part(module) and MODULES[name].name == "__init__.py"):
                visit(name)
        open_.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def test_jetstream_is_imported_in_rollout_only():
    assert importers("jetstream") <= {"rollout"}


def test_a_config_is_resolved_without_the_extras():
    """`pip install rpg_jax` brings no aiohttp, gRPC and JetStream; a run that asks no server needs none."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('aiohttp', 'grpc', 'jetstream')))\n"  # imports of None fail
        "from configs import tiny; from rpg_jax.runs import reinforcement, resolve; resolve.resolve(tiny.get_config())"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_process_of_a_verifier_imports_neither_numpy_nor_jax():
    """It is started anew after each verdict that is too late."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('jax', 'numpy')))\n"  # imports of None fail
        "import rpg_jax.rewards.verifier_process"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_package_imports_no_research_programme():
    assert (ROOT / "experiments").is_dir() and not importers("experiments")


def test_config_ends_in_runs():
    above = {name for names in LAYERS[LAYER["runs"] :] for name in names}
    below = set(LAYER) - above
    assert not importers("ml_collections") & below
    assert not importers("configs") & below


def test_at_the_top_are_ten_commands_and_what_every_room_reads():
    top = {path.stem for path in FILES if len(path.parts) == 2}
    assert top == COMMANDS | {"__init__", "types", "masking"}


def importers(library: str) -> set[str]:
    parts = defaultdict(set)
    for path in FILES:
        for name, _ in imports(path):
            parts[name.split(".")[0]].add(part(module_name(path)))
    return parts[library]


def test_every_package_has_a_layer():
    packages = {path.parts[1] for path in FILES if len(path.parts) > 2}
    missing = packages - set(LAYER)
    assert not missing, f"give {sorted(missing)} a layer in tests/test_imports.py"
