"""A rollout worker: samples completions for a trainer whose config has rollout.driver=fleet.

  python -m rpg_jax.rollout.worker --trainer=127.0.0.1:9100

It takes everything from the trainer: the model, its weights, and what to sample. Start as many as there are machines,
before the trainer or after it; each uses all local devices. A worker may be stopped or killed at any time: others
sample what it had taken. SIGTERM or Ctrl-C gives that back at once. It ends by itself when the run is over.

The exit code is 0 when the run is over, 128 and its number after a signal, 2 when the trainer refuses this worker,
and 1 otherwise.
"""

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

FAILED, REFUSED = 1, 2  # as of the other commands
_LOOK = 0.1  # seconds between two looks at the signals that came


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rpg_jax.rollout.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--trainer", required=True, metavar="HOST:PORT", help="the first process of the trainer")
    parser.add_argument("--run", help="work for the run of this name only")
    parser.add_argument("--key_file", help="file of the fleet's key; default: the variable RPG_JAX_API_KEY")
    parser.add_argument(
        "--certificate",
        help="PEM file of the trainer's certificate, where it is not on this machine; default: the text of the "
        "variable RPG_JAX_CERTIFICATE",
    )
    parser.add_argument("--driver", default="orchestrator", choices=("orchestrator", "lockstep"), help="of the engine")
    parser.add_argument("--slots", type=int, help="completions decoded together on each device; default: the trainer's")
    parser.add_argument("--tensor", type=int, help="devices of a copy of the weights; default: the trainer's")
    parser.add_argument("--expert", type=int, help="groups of experts of a copy; default: the trainer's")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds to wait for a trainer that is silent")
    options = parser.parse_args(argv)
    try:
        return work(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def work(options: argparse.Namespace) -> int:
    """Joins the trainer and works until the run is over or a signal asks to stop; returns the exit code."""
    from rpg_jax.rollout.fleet.link import Link  # loads JAX: wrong flags need not wait for it
    from rpg_jax.rollout.fleet.worker_engine import Choices, WorkerEngine
    from rpg_jax.rollout.fleet.working import Worker
    from rpg_jax.rollout.serving.access import CERTIFICATE, ApiKey, pem_file

    choices = Choices(options.driver, options.slots, options.tensor, options.expert)
    key, certificate = ApiKey.find(options.key_file), pem_file(options.certificate, CERTIFICATE)

    def connect(address: str, stopped: threading.Event) -> Link:
        common = {"key": key, "certificate": certificate, "patience": options.patience}
        return Link(address, **common, stopped=stopped)

    worker = Worker(
        options.trainer,
        connect=connect,
        make_engine=lambda spec: WorkerEngine(spec, choices),
        name=f"{socket.gethostname()}:{os.getpid()}",
        run=options.run,
        lanes=2 if options.driver == "orchestrator" else 1,
    )
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    with ThreadPoolExecutor(1) as pool:  # a handler must not set the event on which its own thread may wait
        working = pool.submit(worker.work)
        while not wait([working], _LOOK).done:
            if received:
                worker.stop()
        working.result()
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that sample for nobody must not hold the process
