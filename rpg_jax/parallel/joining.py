"""The processes of one run join each other, and end together if one of them fails.

On TPU slices the launcher sets JAX_COORDINATOR_ADDRESS and JAX finds the rest. Elsewhere JAX_NUM_PROCESSES and
JAX_PROCESS_ID give the number of processes and the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import types
from typing import Any

import jax

from rpg_jax.parallel import hosts

PORT = 8476  # Google's automatic firewall rule does not open jax's own default, 8482 (jax#35905)
_INITIALIZATION_SECONDS = 1800  # slices of one run may become ready minutes apart
_LOOK_SECONDS = 1.0
_FAREWELL_SECONDS = 3.0  # the other processes look several times
_failing = threading.Event()


def initialize(arguments: dict[str, Any]) -> None:
    """Joins the other processes with the `arguments` that `settings` returned, and returns when all have joined. JAX
    aborts this process if some do not come within half an hour. Later, when another process publishes a failure, this
    process prints it and ends with the exit code of the failure. At its own end this process waits for the others."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM and let the process go on
    jax.distributed.initialize(**arguments)
    _keep_every_program()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                failure = hosts.published_failure()
            except jax.errors.JaxRuntimeError:  # process 0 has gone, and JAX ends this process
                return
            if failure is not None and not _failing.is_set():
                who = f"process {failure.process} on {failure.machine}"
                print(f"error: {who} failed: {failure.reason}", file=sys.stderr)
                _leave(failure.code)

    def finish() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            hosts.barrier("end", patience_ms=300_000)  # as JAX waits; another process may still fail
        over.set()
        watching.join()  # nobody may ask the service while JAX takes it down
        jax.distributed.shutdown()

    (watching := threading.Thread(target=watch, name="failures", daemon=True)).start()
    atexit.register(finish)


def _keep_every_program() -> None:
    """Makes every process write its programs to the compilation cache. JAX lets process 0 alone write.

    A program's key holds the devices that run it, so the processes of a run share no keys, and all but process 0 would
    compile everything at each start. The function of JAX that writes gets process number 0 in place of its own. The
    function is private to JAX: in a version of JAX without this function, process 0 alone writes.
    """
    compiler: Any = sys.modules.get("jax._src.compiler")
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    if write := getattr(compiler, "_cache_write", None):
        compiler._cache_write = types.FunctionType(write.__code__, {**vars(compiler), "distributed": first})


def fail(reason: str, code: int) -> None:
    """Ends this process of a run of several with exit code `code`, by `os._exit`: no clean-up runs. The others print
    `reason` and end with this code.

    A process that has not joined the others joins them first: else they would wait for half an hour. If the others do
    not come within ten minutes, it ends alone. If several fail at once, all end with the code of one failure. Returns
    if the run has one process, its `settings` are wrong, or JAX refuses to join.
    """
    try:
        if not jax.distributed.is_initialized():
            if (arguments := settings()) is None:
                return
            print("joining the other processes of this run to tell them", file=sys.stderr, flush=True)
            nobody = threading.Timer(_INITIALIZATION_SECONDS / 3, _leave, [code])  # JAX would abort the process
            nobody.daemon = True
            nobody.start()
            jax.distributed.initialize(**arguments)
            nobody.cancel()
    except (ValueError, RuntimeError):
        return
    _failing.set()
    hosts.publish_failure(reason, code)
    time.sleep(_FAREWELL_SECONDS)
    first = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        first = hosts.published_failure()
    _leave(first.code if first else code)


def _leave(code: int) -> None:
    """Ends this process with exit code `code`: JAX would wait for the other processes for five minutes. A process that
    serves the coordination service ends four seconds later than the call, and any other process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    if hosts.has_service():  # JAX aborts a process whose service has gone: let the others end first
        time.sleep(_FAREWELL_SECONDS + 1)
    os._exit(code)


def settings(heartbeat_timeout: int | None = None) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize` from JAX_COORDINATOR_ADDRESS (host or host:port),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, the rank. JAX finds number and rank on TPU slices. Returns None without an
    address, for a run of one process. A process that is silent for `heartbeat_timeout` seconds counts as lost; None:
    JAX's own number. Raises ValueError if several processes have no address, a rank is missing or out of range, or a
    number is not whole."""
    env = os.environ
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    processes, process_id = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
    if not coordinator:
        if processes is not None and processes > 1:
            raise ValueError(f"{processes} processes need JAX_COORDINATOR_ADDRESS=HOST:{PORT}, the first's address")
        return None
    if processes is not None and (process_id is None or not 0 <= process_id < processes):
        raise ValueError(f"JAX_PROCESS_ID must be in 0..{processes - 1}, got {process_id}")
    host, _, port = coordinator.rpartition(":") if ":" in coordinator else (coordinator, "", str(PORT))
    return {
        "coordinator_address": f"{host}:{port}",
        "num_processes": processes,
        "process_id": process_id,
        "initialization_timeout": _INITIALIZATION_SECONDS,
        **({} if heartbeat_timeout is None else {"heartbeat_timeout_seconds": heartbeat_timeout}),
    }


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text and not text.isdecimal():
        raise ValueError(f"{variable}={text!r} must be a whole number")
    return int(text) if text else None
