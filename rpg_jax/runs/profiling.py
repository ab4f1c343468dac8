"""What steps cost: their compilations, traces of chosen steps, and a memory profile when the devices run out."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring


class CompilationCounter:
    """Counts the programs that this process compiles, or fetches from the compilation cache, from now on."""

    def __init__(self) -> None:
        self._programs: list[str] = []
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._programs.append(str(details.get("fun_name", "")))
            self._seconds += duration_secs

    def take(self) -> tuple[list[str], float]:
        """(names of the programs, seconds) since the last call."""
        taken = self._programs, self._seconds
        self._programs, self._seconds = [], 0.0
        return taken


def chosen_steps(text: str | None) -> range:
    """The steps that a text names: "12", or "12-14" with both ends; None names none. Raises ValueError otherwise."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"profile.steps is one step or a range of steps, as 12 or 12-14, not {text!r}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


@contextlib.contextmanager
def watched(step: int, traced: range, folder: Path) -> Iterator[None]:
    """Traces a step of `traced` into `folder`/profile, for TensorBoard or Perfetto.

    Raises:
      RuntimeError: the devices ran out of memory. `folder`/memory.prof says what filled them; the message says what
        helps.
    """
    trace = jax.profiler.trace(str(folder / "profile")) if step in traced else contextlib.nullcontext()
    try:
        with trace, jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        profile = folder / "memory.prof"
        jax.profiler.save_device_memory_profile(str(profile))
        raise RuntimeError(
            f"step {step}: the devices are out of memory ({str(error).splitlines()[0][:200]}). In this order: a "
            "smaller train.microbatch_size, model.remat=full or offload, fewer rollout.slots, a larger mesh.fsdp; "
            f"python -m rpg_jax.plan tells what fits before it is run. What filled them: pprof {profile}"
        ) from error


def host_metrics() -> dict[str, float]:
    """This process's resident memory in MiB and its open file descriptors; {} where the system does not tell."""
    status, descriptors = Path("/proc/self/status"), Path("/proc/self/fd")
    if not status.exists():
        return {}
    resident = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return {"host/rss_mib": resident / 1024, "host/open_files": len(list(descriptors.iterdir()))}
