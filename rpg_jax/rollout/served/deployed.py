"""The trainer's weights as servers read them: a folder in Hugging Face layout, written anew by every sync."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from rpg_jax.models import Base
from rpg_jax.rollout.served.balance import Loadable
from rpg_jax.rollout.weights import Params, RolloutError, Weights, weights_checksum


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """Weights in host memory, and their checksum."""

    params: Params
    checksum: int


class Deployed(Weights):
    """The trainer's weights in a folder of their own below `home`; nothing is decoded here.

    The folder of a sync replaces that of the one before. The first one is written by the first call of `sync` after
    the constructor.

    Args:
      params: of the trainer; version 0.
      home: a folder that the trainer writes and all servers read, under the same path. One run has it for itself.
      write: writes weights into a folder.
      use: receives each folder when it is complete.
      dtype: of the weights in the folder; None for that of `params`.
      base: the frozen weights, if `params` are adapters; the folder has the two merged.
    """

    def __init__(
        self,
        params: Params,
        home: Path,
        write: Callable[[Path, Params], None],
        use: Callable[[Loadable], None],
        *,
        dtype: Any = None,
        base: Base | None = None,
    ):
        self._home, self._write, self._use = home, write, use
        self._begun = False
        super().__init__(params, dtype=dtype, base=base, merge=True)
        self._begun = True

    def stage(self, params: Params) -> HostCopy:  # type: ignore[override]  # on no device
        """A copy in host memory; nothing else of a sync runs on the devices."""
        converted = self._converted(params)
        checksum = weights_checksum(converted)
        return HostCopy(jax.device_get(converted), checksum)

    def sync(self, params: Params | HostCopy, version: int) -> None:  # type: ignore[override]
        """Writes the folder, and takes the last one away."""
        if not self._begun:  # the weights of a run that continues are not read yet
            self._version, self._checksum = version, None
            return
        copy = params if isinstance(params, HostCopy) else self.stage(params)
        folder = self._home / f"weights-{copy.checksum:016x}"
        if not (folder / "config.json").exists():
            shutil.rmtree(made := folder.with_suffix(".partial"), ignore_errors=True)
            self._write(made, copy.params)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        with self.lock:
            self._version, self._checksum = version, copy.checksum
        self._use(Loadable(str(folder), f"{version}-{copy.checksum:016x}", copy.checksum))
        for other in self._home.glob("weights-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def checksum(self) -> int:
        """Of the weights in the folder."""
        assert self._checksum is not None, "a sync sets it"
        return self._checksum

    def verify(self, params: Params | HostCopy) -> None:  # type: ignore[override]
        """Raises RolloutError if the folder has other weights. What servers made of it, only some of them tell."""
        own = params.checksum if isinstance(params, HostCopy) else weights_checksum(self._converted(params))
        if own != self.checksum():
            raise RolloutError(f"the servers' folder has weights {self.checksum():016x}, and the trainer {own:016x}")

    def pinned(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("the weights are with the servers")
