"""Installs the trackers that a config asks for, on a worker: `extras.py --config=configs/x.py ...`.

Runs before the trainer, with its arguments and the Python of .venv, and installs nothing where no tracker is missing.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = "requirements-trackers.lock"
MODULES = {"wandb": "wandb", "tensorboard": "tensorboardX"}  # of the trackers that LOCK has


def asked_for(log: dict) -> list[str]:
    """The trackers of the section `log` of a resolved config."""
    return [name.strip() for name in (log.get("tracker") or "").split(",") if name.strip()]


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from rpg_jax.runs import cli

    parser = cli.parser("train", __doc__)
    parser.add_config()
    try:
        loaded = cli.load_config(parser.read(argv))
    except ValueError:
        return 0  # the trainer says what is wrong
    asked = asked_for(loaded.config.log.to_dict()) if loaded else []
    missing = [name for name in asked if importlib.util.find_spec(MODULES.get(name, name)) is None]
    if not missing:
        return 0
    print(f"installing {', '.join(missing)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    return subprocess.run([*pip, "--require-hashes", f"--requirement={ROOT / LOCK}"]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
