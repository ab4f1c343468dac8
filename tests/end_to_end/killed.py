"""`python -m rpg_jax.train` that is sent a signal within a named part of a run; started by test_kills.py.

  python -m tests.end_to_end.killed POINT CALL DELAY SIGNAL [flags of train]

The signal arrives DELAY seconds after the CALL-th entry of POINT, with a DELAY of 0 before anything is done there; for
the POINT "saved", right after the CALL-th checkpoint is complete, before anything else is done.
"""

import functools
import os
import sys
import threading

from rpg_jax.environments.player import Player
from rpg_jax.runs import evaluation, train_command
from rpg_jax.runs.session import Session
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.journal import _Writer
from rpg_jax.training.collect import Collector
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.reference import Reference

POINTS = {
    "rollout": (GroupGenerator, "__call__"),
    "update": (Reference, "after_update"),
    "checkpoint": (Checkpoints, "save"),
    "evaluation": (evaluation, "records"),
    "reference": (Reference, "_move"),
    "sync": (Collector, "sync"),
    "journal": (_Writer, "_write"),
}
WITH_TURNS = POINTS | {"turn": (Player, "respond")}


def arm(point, call, delay, number):
    owner, name = WITH_TURNS[point]
    original, left = getattr(owner, name), [call]

    @functools.wraps(original)
    def entered(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(delay, os.kill, (os.getpid(), number)).start() if delay else os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    setattr(owner, name, entered)


def arm_saved(call, number):
    original, left = Session.save, [call]

    def save(session, **keywords):
        original(session, **keywords)
        left[0] -= 1
        if left[0] == 0:
            session.checkpointing.checkpoints.wait()
            os.kill(os.getpid(), number)

    Session.save = save


if __name__ == "__main__":
    if sys.argv[1] == "saved":
        arm_saved(int(sys.argv[2]), int(sys.argv[4]))
    else:
        arm(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    sys.argv = sys.argv[:1] + sys.argv[5:]
    sys.exit(train_command.main())
