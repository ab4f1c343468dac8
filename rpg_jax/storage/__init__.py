"""The files of a run: local folders and buckets, checkpoints of the training state, snapshots of weights."""

from rpg_jax.storage.files import Folder, absolute, in_bucket, local, local_copy, move, naming, write_atomically

__all__ = ["Folder", "absolute", "in_bucket", "local", "local_copy", "move", "naming", "write_atomically"]
