"""Installs the optional packages that a config asks for, on a worker: `extras.py --config=configs/x.py ...`.

Runs before the trainer, with its arguments and the Python of .venv. Without such packages it installs nothing.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

# a name in log.tracker: (module, package)
PACKAGES = {
    "wandb": ("wandb", "wandb>=0.19,<1"),
    "tensorboard": ("tensorboardX", "tensorboardX>=2.6,<3"),
    "mlflow": ("mlflow", "mlflow>=3,<4"),
    "trackio": ("trackio", "trackio>=0.2,<1"),
}


def asked_for(log: dict) -> list[str]:
    """The modules that the section `log` of a resolved config needs."""
    names = [name.strip() for name in (log.get("tracker") or "").split(",")]
    return [module for name, (module, _) in PACKAGES.items() if name in names]


def missing(modules: list[str]) -> list[str]:
    """The packages of those of `modules` that are not installed here."""
    packages = dict(PACKAGES.values())
    return [packages[module] for module in modules if importlib.util.find_spec(module) is None]


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from rpg_jax.runs import cli

    parser = cli.parser("train", __doc__)
    parser.add_config()
    try:
        loaded = cli.load_config(parser.read(argv))
    except ValueError:
        return 0  # the trainer says what is wrong
    packages = missing(asked_for(loaded.config.log.to_dict())) if loaded else []
    if not packages:
        return 0
    print(f"installing {', '.join(packages)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-input", *packages])
    if done.returncode:
        print(f"error: {', '.join(packages)} could not be installed, which the config asks for", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
