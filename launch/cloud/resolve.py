"""Prints as JSON the config, mesh and row shards that trainer arguments give on a number of chips.

Usage: .venv/bin/python launch/cloud/resolve.py --chips=16 --slices=2 --config=configs/x.py --config.field=value ...
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rpg_jax.runs import cli


def resolved(argv: list[str]) -> dict[str, Any]:
    """The config, the sizes of the training mesh's axes, the shards of rows, and bytes of weights by model.size (bf16).

    Raises:
      ValueError: an argument that the trainer does not take, or a mesh that the chips cannot form.
    """
    parser = cli.parser("train", __doc__)
    parser.add_config()
    parser.add_argument("--chips", type=int, required=True, help="of all slices")
    parser.add_argument("--slices", type=int, default=1, help="TPU slices")
    options = parser.read(argv)
    loaded = cli.load_config(options)
    if loaded is None:
        raise ValueError("--config=configs/... is missing")
    from rpg_jax import parallel  # loads JAX: wrong flags need not wait for it
    from rpg_jax.models import sizes
    from rpg_jax.runs import resolve

    resolve.resolve(loaded.config)
    fields = json.loads(loaded.config.to_json_best_effort())
    mesh = parallel.mesh_sizes(fields["mesh"], options.chips - fields["rollout"]["devices"], options.slices)
    row_shards = parallel.shards("batch", mesh, parallel.parse_rules(fields["sharding"]))
    known = fields["model"]["size"]
    weights = 2 * sizes.parameter_count(sizes.size(known)) if known else 0
    return {"config": fields, "mesh": mesh, "row_shards": row_shards, "weights": weights}


if __name__ == "__main__":
    try:
        print(json.dumps(resolved(sys.argv[1:])))
    except ValueError as error:
        sys.exit(str(error))
