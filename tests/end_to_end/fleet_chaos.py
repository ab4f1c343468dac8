"""A trainer and its workers, which are killed, stopped and added at random; the run must be as one without a fleet.

  python -m tests.end_to_end.fleet_chaos --steps=200 --processes=2 --events=40

It prints figures: events of each kind, seconds, groups that were sampled again, and late or double results.
"""

import argparse
import collections
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.end_to_end.test_processes import assert_same_run, printed, records, reserve_port, run, samples, start
from tests.end_to_end.whole_runs import ROOT, environment

WORKERS = 3
UNAWARE_SECONDS = 60  # a worker that began or went on so shortly before the end may not have heard of it
SETTINGS = (
    "--config.model.num_layers=1",
    "--config.model.embed_dim=32",
    "--config.model.hidden_dim=64",
    "--config.warm_start.enabled=False",
    "--config.dynamic_sampling.enabled=False",
    "--config.rewards.parts=exact:1,format:1",  # of random weights too, some completions are numbers and some are not
    "--config.log.samples_per_step=1000",
    "--config.evaluation.every=100000",
    "--config.evaluation.problems=8",
    "--config.evaluation.k=1",
    "--config.checkpoint.every=100000",
    "--config.fleet.lost_seconds=5",
)


class Crew:
    """Workers of a trainer on loopback, of which some are stopped. Leaving it ends all of them."""

    def __init__(self, folder, port):
        self._folder, self._port = folder, port
        self.running, self.stopped = [], {}
        self.started = 0
        self._since = {}  # {process: when it began, or went on after a pause}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.running, *self.stopped]:
            process.kill()
            process.wait()

    def add(self):
        env = environment(self._folder / "workers")
        command = [sys.executable, "-m", "rpg_jax.rollout.worker", f"--trainer=127.0.0.1:{self._port}"]
        self.started += 1
        with (self._folder / f"worker{self.started}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        self._since[process] = time.monotonic()
        self.running.append(process)

    def kill(self, process):
        self.running.remove(process)
        process.kill()
        process.wait()

    def stop(self, process, seconds):
        process.send_signal(signal.SIGSTOP)
        self.running.remove(process)
        self.stopped[process] = time.monotonic() + seconds

    def wake(self):
        """Lets the workers go on whose pause is over."""
        for process, until in list(self.stopped.items()):
            if time.monotonic() >= until:
                process.send_signal(signal.SIGCONT)
                del self.stopped[process]
                self._since[process] = time.monotonic()
                self.running.append(process)

    def ended(self, timeout):
        """The exit codes of all workers, once the trainer has dismissed them.

        A worker that was starting or stopped then did not hear it, and waits for a trainer: it is asked to end.
        """
        over = time.monotonic()
        for process in list(self.stopped):
            self.stopped[process] = 0.0
        self.wake()
        return [self._code(process, over, timeout) for process in self.running]

    def _code(self, process, over, timeout):
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            assert over - self._since[process] < UNAWARE_SECONDS, "it knew the trainer, and did not end with it"
            process.terminate()
            return process.wait(timeout)


def disturb(crew, dice, busy, pause):
    """One random event after another while `busy()`; returns how many of each kind."""
    events = collections.Counter()
    while busy():
        time.sleep(dice.uniform(*pause))
        crew.wake()
        alive = [p for p in crew.running if p.poll() is None]
        kind = dice.choice(["kill", "stop", "add"])
        if kind == "add" and len(alive) + len(crew.stopped) < WORKERS + 1:
            crew.add()
        elif kind == "kill" and alive:
            crew.kill(dice.choice(alive))
        elif kind == "stop" and alive:
            crew.stop(dice.choice(alive), dice.uniform(1, 12))
        else:
            continue
        events[kind] += 1
    return events


def fleet_overrides(port):
    return "--config.rollout.driver=fleet", f"--config.fleet.port={port}"


def chaos(folder, *, steps, processes, seed, pause, patience, settings=()):
    """Runs with and without a fleet; returns figures. Raises AssertionError where they differ or anything hangs."""
    common = (*SETTINGS, *settings, f"--config.train.steps={steps}")
    devices = processes
    mesh = (f"--config.mesh.fsdp={processes}", "--config.mesh.replica=1")
    plain = run(folder, processes, *common, *mesh, "--config.run.name=plain", devices=devices)
    reserved, port = reserve_port()
    reserved.close()
    began = time.monotonic()
    trainer = start(
        folder, processes, *common, *mesh, *fleet_overrides(port), "--config.run.name=fleet", devices=devices
    )
    with Crew(folder, port) as crew, contextlib.ExitStack() as closing:
        for process in trainer:
            closing.callback(process.kill)
        for _ in range(WORKERS):
            crew.add()
        metrics = folder / "fleet" / "metrics.jsonl"

        def busy():
            assert time.monotonic() - began < patience, "it hangs"
            return all(process.poll() is None for process in trainer)

        while busy() and (not metrics.exists() or metrics.read_text().count("\n") < 2):
            time.sleep(0.2)
        first = time.monotonic()
        events = disturb(crew, random.Random(seed), busy, pause)
        outputs = printed(trainer, timeout=60)
        seconds = time.monotonic() - first
        assert all(process.returncode == 0 for process in trainer), "\n".join(outputs)
        codes = crew.ended(timeout=60)
    assert_same_run(folder / "plain", folder / "fleet")
    assert outputs[0].splitlines()[-1] == plain[0].splitlines()[-1], "the weights differ"
    assert set(codes) <= {0, 128 + signal.SIGTERM}, codes
    counts = collections.Counter()
    for record in records(folder / "fleet"):
        counts.update({k.removeprefix("fleet/"): v for k, v in record.items() if k.startswith("fleet/")})
    return {
        "events": dict(events),
        "seconds": round(seconds),
        "steps": steps,
        "samples": len(samples(folder / "fleet")),
    } | {
        name: int(counts[name])
        for name in ("groups", "lost", "reassigned", "late", "duplicates", "differing", "joined")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="of the trainer")
    parser.add_argument("--events", type=int, default=40, help="the fewest that count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), help="seconds between two events")
    parser.add_argument("--patience", type=float, default=3600, help="seconds after which a run counts as hung")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = chaos(
            Path(scratch),
            steps=arguments.steps,
            processes=arguments.processes,
            seed=arguments.seed,
            pause=arguments.pause,
            patience=arguments.patience,
        )
    print(figures)
    assert sum(figures["events"].values()) >= arguments.events, "too few events: raise --steps or lower --pause"


if __name__ == "__main__":
    main()
