"""Whether another start of a run would end as the last one did: a supervisor must not start such a run again."""

from __future__ import annotations

import contextlib
import json

import jax

from rpg_jax import storage
from rpg_jax.runs import cli
from rpg_jax.storage import errors
from rpg_jax.storage.checkpoints import committed_steps

NOTE = "failures.json"
_STARTS = 3


def ends_again(folder: storage.Folder, error: Exception, *, stepped: bool) -> str:
    """Why another start of the run in `folder` would end with `error` too; "" if another start may go on.

    A lack of memory comes again, and so does a bug before the first step (not `stepped`). For other errors, such as a
    silent judge, `NOTE` in the folder counts the starts that ended with the same text after the same checkpoint: the
    third is the last. Errors of storage, of a lost process and of the user do not count.
    """
    if (code := cli.exit_code(error)) not in (None, cli.FAILED):
        return ""
    causes = list(errors.chain(error))
    if any(isinstance(one, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(one) for one in causes):
        return "another start would need the same memory"
    if errors.is_transient(error) or any(isinstance(one, OSError) for one in causes):
        return ""
    if code is None and not stepped:
        return "it took no step, and another start would end the same"
    file, times, before = folder.home / NOTE, 1, None
    now = [max(committed_steps(folder.home / "checkpoints"), default=0), errors.one_line(error)]
    with contextlib.suppress(OSError, ValueError):
        *before, times = json.loads(file.read_text())
    times = times + 1 if before == now else 1
    file.write_text(json.dumps([*now, times]))
    return f"{times} starts have ended so after checkpoint {now[0]}" if times >= _STARTS else ""
