"""Prints what trainer arguments make of a number of chips, as JSON; runs in the repository's environment.

Usage: .venv/bin/python launch/cloud/resolve.py --chips=16 --slices=2 --config=configs/x.py --config.field=value ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # configs import each other as `configs.x`


def resolved(argv: list[str]) -> dict[str, Any]:
    """The config, the size of every mesh axis of what trains, and over how many shards the rules spread rows.

    Raises:
      ValueError: an argument that the trainer does not take, or a mesh that the chips do not make.
    """
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file("config", lock_config=True, flag_values=values, sys_argv=argv)
    chips = flags.DEFINE_integer("chips", None, "of all slices", flag_values=values, required=True)
    slices = flags.DEFINE_integer("slices", 1, "TPU slices", flag_values=values)
    try:
        rest = values(argv)[1:]
    except (flags.Error, KeyError, AttributeError, OSError, TypeError, ValueError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"{' '.join(str(message).split())}; see --help of the trainer") from error
    if rest or config.value is None:
        raise ValueError(f"unexpected argument {rest[0]!r}" if rest else "--config=configs/... is missing")
    from rpg_jax import parallel  # loads JAX, which a wrong argument need not wait for

    fields = json.loads(config.value.to_json_best_effort())
    mesh = parallel.mesh_sizes(fields["mesh"], chips.value - fields["rollout"]["devices"], slices.value)
    row_shards = parallel.shards("batch", mesh, parallel.parse_rules(fields["sharding"]))
    return {"config": fields, "mesh": mesh, "row_shards": row_shards}


if __name__ == "__main__":
    try:
        print(json.dumps(resolved(sys.argv)))
    except ValueError as error:
        sys.exit(str(error))
