"""Prints as JSON the config, mesh and row shards that trainer arguments give on a number of chips.

Usage: .venv/bin/python launch/cloud/resolve.py --chips=16 --slices=2 --config=configs/x.py --config.field=value ...
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rpg_jax.runs import cli


def resolved(argv: list[str]) -> dict[str, Any]:
    """The config, the sizes of the training mesh's axes, the shards of rows, and `copied`.

    Raises:
      ValueError: an argument that the trainer does not take, a config that it refuses, or a mesh that the chips cannot
        form. Files of problems and weights are not read.
    """
    parser = cli.parser("train", __doc__)
    parser.add_config()
    parser.add_argument("--chips", type=int, required=True, help="of all slices")
    parser.add_argument("--slices", type=int, default=1, help="TPU slices")
    parser.add_switch("serves", help="the config is a server's, which trains nothing")
    options = parser.read(argv)
    loaded = cli.load_config(options)
    if loaded is None:
        raise ValueError("--config=configs/... is missing")
    from rpg_jax import parallel  # loads JAX: wrong flags need not wait for it
    from rpg_jax.runs import problems, reinforcement, resolve

    config = resolve.resolve(loaded.config)
    if not options.serves:  # what the trainer refuses at its start
        if config.model.path or not config.model.size:  # a size alone is refused with the fix of a cloud
            resolve.check_training(loaded.config)
        resolve.check_sampling(config)
        reinforcement.check_rows(config)
        if config.task.name in problems.GENERATED:  # reads no files
            problems.Task.from_config(config, train=False)
    fields = json.loads(loaded.config.to_json_best_effort())
    mesh = parallel.mesh_sizes(fields["mesh"], options.chips - fields["rollout"]["devices"], options.slices)
    row_shards = parallel.shards("batch", mesh, parallel.parse_rules(fields["sharding"]))
    return {"config": fields, "mesh": mesh, "row_shards": row_shards, "weights": copied(fields)}


def copied(fields: dict[str, Any]) -> dict[str, int]:
    """Bytes in bf16 of the weights that a worker copies to its disk, by their address: the policy's and the teacher's.

    A model whose size is not set, and whose config cannot be read here, is left out.
    """
    from rpg_jax import models
    from rpg_jax.models import sizes

    found = {}
    for path, size in ((fields["model"]["path"], fields["model"]["size"]), (fields["reference"]["path"], None)):
        if (path or size) and not (path or "").startswith("/"):
            with contextlib.suppress(ValueError, OSError):
                model = sizes.size(size) if size else models.read_config(models.local_folder(path, weights=False))
                found[path or size] = 2 * sizes.parameter_count(model)
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(resolved(sys.argv[1:])))
    except ValueError as error:
        sys.exit(str(error))
