"""Servers that are killed, stopped, started anew and added, behind a bad network; the run is as one without servers.

  python -m tests.end_to_end.servers_chaos --steps=200 --processes=2

It prints figures: events of each kind, faults of the network, seconds, and what the servers' metrics say.
"""

import argparse
import collections
import contextlib
import itertools
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.end_to_end.test_processes import MICRO, assert_same_run, printed, records, reserve_port, run, samples, start
from tests.end_to_end.whole_runs import ROOT, environment, kept_for
from tests.rollout.servers.proxy import FAULTS, Proxy

SERVERS = 3
MODEL = ("--config.model.num_layers=1", "--config.model.embed_dim=32", "--config.model.hidden_dim=64")
SETTINGS = (
    *MODEL,
    "--config.warm_start.enabled=False",
    "--config.dynamic_sampling.enabled=False",
    "--config.rewards.parts=exact:1,format:1",  # of random weights too, some completions are numbers and some are not
    "--config.log.samples_per_step=1000",
    "--config.evaluation.every=100000",
    "--config.evaluation.problems=8",
    "--config.evaluation.k=1",
    "--config.checkpoint.every=100000",
)


class ServerProcess:
    """`rpg_jax.serve` on one port, with weights that no trainer has, until it loads those of `weights`."""

    def __init__(self, folder, weights, *flags):
        self._folder, self._flags = folder, [f"--config={MICRO}", *MODEL, "--config.warm_start.seed=3", *flags]
        self._flags.append(f"--weights_from={weights}")
        reserved, self.port = reserve_port()
        reserved.close()
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def start(self):
        """Returns when it serves."""
        command = [sys.executable, "-m", "rpg_jax.serve", *self._flags, "--port=0", f"--http_port={self.port}"]
        options = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=environment(kept_for(self._folder, "server")), **options)
        line = self.process.stdout.readline()
        assert f"over HTTP on port {self.port}" in line, line + self.process.communicate(timeout=60)[0]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()


class Servers:
    """Servers that come and go, and a folder of their addresses. Leaving it ends all of them.

    One connection in `every` has a fault; 0 for a good network.
    """

    def __init__(self, folder, weights, dice, every):
        self._folder, self._weights, self._dice, self._every = folder, weights, dice, every
        self.addresses = folder / "addresses"
        self.addresses.mkdir()
        self.alive, self.stopped, self.proxies = [], {}, []
        self._starting, self._over = 0, False
        self._all, self._threads, self._lock = [], [], threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._over = True
        for thread in self._threads:  # that start servers
            thread.join()
        for server in self._all:
            server.kill()
        for proxy in self.proxies:
            proxy.end()

    @property
    def faults(self):
        return collections.Counter(str(fault) for proxy in self.proxies for fault in proxy.met if fault is not None)

    def add(self):
        """A further server, behind a proxy of its own; its address is known at once."""
        server = ServerProcess(self._folder, self._weights)
        url = server.url
        if self._every:
            dice = random.Random(self._dice.random())
            faults = (dice.choice(FAULTS) if dice.random() < 1 / self._every else None for _ in itertools.count())
            self.proxies.append(Proxy(server.port, faults))
            url = self.proxies[-1].url
        self._all.append(server)
        (self.addresses / f"server{server.port}").write_text(url, encoding="utf-8")
        self.start(server)

    def start(self, server):
        """Starts a server, or starts it anew; it counts as alive when it serves."""

        def begin():
            if not self._over:
                server.start()
            with self._lock:
                self.alive.append(server)
                self._starting -= 1

        with self._lock:
            self._starting += 1
        self._threads.append(threading.Thread(target=begin, daemon=True))
        self._threads[-1].start()

    @property
    def count(self):
        return len(self.alive) + len(self.stopped) + self._starting

    def wake(self):
        """Lets the servers go on whose pause is over."""
        for server, until in list(self.stopped.items()):
            if time.monotonic() >= until:
                server.process.send_signal(signal.SIGCONT)
                del self.stopped[server]
                self.alive.append(server)

    def disturb(self):
        """One random event, if there can be one; returns its kind."""
        self.wake()
        kind = self._dice.choice(["kill", "restart", "stop", "add"])
        if kind == "add":
            if self.count > SERVERS:
                return None
            self.add()
            return kind
        if not self.alive:
            return None
        server = self._dice.choice(self.alive)
        self.alive.remove(server)
        if kind == "stop":
            server.process.send_signal(signal.SIGSTOP)
            self.stopped[server] = time.monotonic() + self._dice.uniform(1, 12)
        elif kind == "restart":  # the same address, with other weights
            server.kill()
            self.start(server)
        else:
            server.kill()
            (self.addresses / f"server{server.port}").unlink()
        return kind


def overrides(weights, addresses):
    return (
        "--config.rollout.driver=servers",
        "--config.servers.kind=rpg_jax",
        f"--config.servers.urls=file:{addresses}",
        f"--config.servers.weights={weights}",
    )


def chaos(folder, *, steps, processes, seed, pause, every, patience, settings=()):
    """Runs with and without servers; returns figures. Raises AssertionError where they differ or anything hangs."""
    common = (*SETTINGS, *settings, f"--config.train.steps={steps}")
    mesh = (f"--config.mesh.fsdp={processes}", "--config.mesh.replica=1")
    began = time.monotonic()
    plain = run(folder, processes, *common, *mesh, "--config.run.name=plain", devices=processes)
    alone = time.monotonic() - began
    weights, events, dice = folder / "weights", collections.Counter(), random.Random(seed)
    with Servers(folder, weights, dice, every) as servers, contextlib.ExitStack() as closing:
        for _ in range(SERVERS):
            servers.add()
        began = time.monotonic()
        names = (*overrides(weights, servers.addresses), "--config.run.name=served")
        trainer = start(folder, processes, *common, *mesh, *names, devices=processes)
        for process in trainer:
            closing.callback(process.kill)
        metrics, first = folder / "served" / "metrics.jsonl", None
        while all(process.poll() is None for process in trainer):
            assert time.monotonic() - began < patience, "it hangs"
            if not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
                time.sleep(0.2)
                continue
            first = first or time.monotonic()
            time.sleep(dice.uniform(*pause))
            if kind := servers.disturb():
                events[kind] += 1
        outputs = printed(trainer, timeout=60)
        seconds = time.monotonic() - first
        assert all(process.returncode == 0 for process in trainer), "\n".join(outputs)
        faults = servers.faults
    assert_same_run(folder / "plain", folder / "served")
    checksums = [re.search("weights checksum: .*", text[0]).group() for text in (plain, outputs)]
    assert checksums[0] == checksums[1], checksums
    counts = collections.Counter()
    for record in records(folder / "served"):
        counts.update({k.removeprefix("servers/"): v for k, v in record.items() if k.startswith("servers/")})
    figures = {"steps": steps, "processes": processes, "completions": len(samples(folder / "served"))}
    idle = max(record.get("servers/longest_idle", 0.0) for record in records(folder / "served"))
    assert idle < 2, f"{idle:.1f} s in which a server was idle while work waited"
    figures |= {
        "longest_idle": round(idle, 2),
        "seconds": round(seconds),
        "alone": round(alone),
        "events": dict(events),
        "faults": dict(faults),
    }
    return figures | {name: int(counts[name]) for name in ("requests", "refused", "failures", "loads")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="of the trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), help="seconds between two events")
    parser.add_argument("--every", type=int, default=20, help="connections for one fault of the network; 0: none")
    parser.add_argument("--patience", type=float, default=3600, help="seconds after which a run counts as hung")
    with tempfile.TemporaryDirectory() as scratch:
        print(chaos(Path(scratch), **vars(parser.parse_args())))


if __name__ == "__main__":
    main()
