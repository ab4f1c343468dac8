"""Where published weights come from: a local folder, a bucket, or the Hugging Face hub."""

import re
from pathlib import Path

from rpg_jax import storage

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")  # config, tokenizer, chat template
_WEIGHTS = ("*.safetensors",)  # never *.bin and *.pt, which are pickles: loading one executes it
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(address: str | Path, *, weights: bool = True) -> Path:
    """The folder in Hugging Face layout at `address`: a local folder itself, or a copy that is kept on this host.

    Args:
      address: a local path; configs/NAME, a model that comes with the code; gs://BUCKET/FOLDER; or OWNER/NAME on the
        hub, if there is no local folder of that name.
      weights: False fetches only config and tokenizer.

    Raises:
      ValueError: the address is of another kind, or there is nothing.
      StorageFailure: the bucket cannot be read, after retries.
    """
    text, wanted = str(address), _DESCRIPTION + _WEIGHTS * weights
    if storage.in_bucket(text):
        return storage.local_copy(text, wanted)
    if not Path(address).exists() and (shipped := _shipped(text)):
        return shipped
    if Path(address).exists() or not _ON_HUB.fullmatch(text):
        storage.local(address)
        return Path(address)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=list(wanted), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client and its transport raise errors of many kinds
        raise ValueError(
            f"{text} is not a local folder, and the hub did not provide it: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}. Fetch it where there is a network: hf download {text} "
            f"--local-dir {text.rpartition('/')[2].lower()}"
        ) from error


def _shipped(address: str) -> Path | None:
    """A small model in configs/, which is beside the package in a checkout and in it in a wheel; None without one."""
    package = Path(__file__).resolve().parents[1]
    found = (home / address for home in (package.parent, package) if address.startswith("configs/"))
    return next((folder for folder in found if (folder / "config.json").exists()), None)
