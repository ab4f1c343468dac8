"""The files of a run: local folders and buckets, checkpoints of the training state, snapshots of weights."""

from rpg_jax.storage.files import Folder as Folder
from rpg_jax.storage.files import absolute as absolute
from rpg_jax.storage.files import cache_folder as cache_folder
from rpg_jax.storage.files import in_bucket as in_bucket
from rpg_jax.storage.files import local as local
from rpg_jax.storage.files import local_copy as local_copy
from rpg_jax.storage.files import locked as locked
from rpg_jax.storage.files import move as move
from rpg_jax.storage.files import naming as naming
from rpg_jax.storage.files import whole as whole
from rpg_jax.storage.files import write_atomically as write_atomically
