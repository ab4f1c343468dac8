"""The first hour on an accelerator: checks this machine step by step, and writes one report to send.

  python -m launch.first_hour --platform=gpu --quick

Each step is a command in a process of its own; docs/first_hour.md says why it is there. --out receives report.md,
report.json and a log of each step. A step has passed, has failed, or could not be run, for example without a network.
The same command continues after an interruption: it keeps what has passed, if commit, packages and devices are equal.
The exit code is 3 if a step failed. Run it from the repository.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rpg_jax import storage
from rpg_jax.bench import cell
from rpg_jax.report.run_files import read_metrics
from rpg_jax.report.tables import markdown_table
from rpg_jax.runs import cli
from rpg_jax.storage.files import read_if_there, to_json

PASSED, FAILED, NOT_RUN = "passed", "failed", "could not be run"
LIMIT_SECONDS = 3600.0  # a step that takes longer hangs
_OFFLINE = re.compile(r"^error: (cannot download .*)", re.MULTILINE)
_VERSIONS = "import json; from rpg_jax.runs import run_folder; print(json.dumps(run_folder.made_with()))"

Json = dict[str, Any]
Verdict = tuple[bool, str]  # whether a step passed, and what was seen


@dataclasses.dataclass(frozen=True)
class Step:
    """One command, and what to expect of it.

    Attributes:
      arguments: of Python.
      check: judges the lines of JSON that the command printed.
      without: why the step cannot be run on this platform; "" if it can.
    """

    name: str
    expected: str
    arguments: Sequence[str]
    check: Callable[[list[Json]], Verdict]
    without: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("launch.first_hour", __doc__)
    parser.add_argument("--platform", choices=("tpu", "gpu", "cpu"), required=True, help="that the machine must have")
    parser.add_argument("--quick", action="store_true", help="fewer steps of training: minutes")
    parser.add_argument("--out", default="runs/first_hour", help="folder or gs://BUCKET/FOLDER (default: %(default)s)")
    return cli.run(first_hour, parser, argv)


def first_hour(options: argparse.Namespace) -> int:
    """Carries out every step that has not passed yet; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the present step too
    with storage.Folder(options.out) as folder:
        folder.fetch()
        report = Report(folder.files, options.platform, options.quick)
        devices = report.carry_out(_devices(options.platform))
        if devices["result"] == PASSED:
            report.continue_with(devices["measured"][0])
            for step in steps(options.platform, options.quick, report.runs):
                report.carry_out(step)
                folder.push()
        print(folder.shown(f"{report.write()}: {report.summary()}"))
    return cli.GAVE_UP if FAILED in report.summary() else 0


class Report:
    """The results so far, in the files of one folder.

    Attributes:
      machine: platform, versions and devices; results of another machine do not count.
      steps: the result of each step by its name.
      runs: the local folder of the runs of these versions.
    """

    def __init__(self, files: Path, platform: str, quick: bool):
        self._files, self._kept = files, read_if_there(files / "report.json")
        self.machine: Json = {"platform": platform, "quick": quick}
        self.steps: dict[str, Json] = {}
        self.runs = Path("runs")

    def continue_with(self, versions: Json) -> None:
        """Takes over what has passed in the same versions, if the folder has such a report."""
        self.machine |= {name: value for name, value in versions.items() if name != "command"}
        if self._kept.get("machine") == self.machine:
            self.steps = {name: step for name, step in self._kept["steps"].items() if step["result"] == PASSED}
        self.runs /= f"first_hour-{hashlib.sha256(json.dumps(self.machine).encode()).hexdigest()[:8]}"

    def carry_out(self, step: Step) -> Json:
        """Runs a step, if it has not passed yet, and returns its result."""
        if step.name in self.steps:
            print(f"{step.name}: has passed")
            return self.steps[step.name]
        command, name = f"python {shlex.join(step.arguments)}", f"logs/{step.name.replace(' ', '-')}.txt"
        print(f"{step.name}: {command}", flush=True)
        began = time.perf_counter()
        result, seen, measured = judged(step, self._files / name, self.machine["platform"])
        seconds = round(time.perf_counter() - began, 1)
        print(f"  {result} in {seconds:.0f} s: {seen}", flush=True)
        told = {"result": result, "seen": seen, "expected": step.expected, "seconds": seconds}
        self.steps[step.name] = told | {"command": command, "log": name, "measured": measured}
        self.write()
        return self.steps[step.name]

    def summary(self) -> str:
        counts = collections.Counter(step["result"] for step in self.steps.values())
        return ", ".join(f"{number} {result}" for result, number in counts.items())

    def write(self) -> Path:
        """Writes report.json and report.md; returns the latter's path."""
        content = {"machine": self.machine, "steps": self.steps}
        storage.write_atomically(self._files / "report.json", to_json(content, indent=1))
        columns = ("result", "seen", "expected", "seconds", "log")
        rows = [(name, *(step[column] for column in columns)) for name, step in self.steps.items()]
        parts = [f"# The first hour on {self.machine.get('devices', 'a machine')}: {self.summary()}"]
        machine = [(name, cell(value)) for name, value in self.machine.items()]
        parts += [markdown_table(("step", *columns), rows), markdown_table(("machine", ""), machine)]
        for name, step in self.steps.items():
            parts += [f"## {name.capitalize()}", f"`{step['command']}`"]
            fields = list(dict.fromkeys(field for one in step["measured"] for field in one))
            lines = [(field, *(cell(one.get(field, "")) for one in step["measured"])) for field in fields]
            parts += [markdown_table(("field", *[""] * len(step["measured"])), lines)] * bool(lines)
            if step["result"] == FAILED:
                end = (self._files / step["log"]).read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
                parts.append("\n".join(f"    {line}" for line in end))
        storage.write_atomically(self._files / "report.md", "\n\n".join(parts) + "\n")
        return self._files / "report.md"


def judged(step: Step, log: Path, platform: str) -> tuple[str, str, list[Json]]:
    """Runs the command of a step with its output in `log`; returns the result, what was seen, and the lines of JSON."""
    if step.without:
        return NOT_RUN, step.without, []
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"JAX_PLATFORMS": "cuda" if platform == "gpu" else platform, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *step.arguments]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as it:
        try:
            code = it.wait(LIMIT_SECONDS)
        except BaseException as error:
            it.terminate()  # a run saves and ends; the same command continues it
            with contextlib.suppress(subprocess.TimeoutExpired):
                it.wait(60)
            it.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return FAILED, f"no end after {LIMIT_SECONDS:.0f} s", []
            raise
    text = log.read_text(encoding="utf-8", errors="replace")
    measured = [json.loads(line) for line in text.splitlines() if re.fullmatch(r'\{".*\}', line)]
    if offline := _OFFLINE.search(text):
        return NOT_RUN, offline[1], measured
    if code and not measured:
        return FAILED, f"exit code {code}: {(text.splitlines() or ['no output'])[-1]}", measured
    try:
        passed, seen = step.check(measured)
    except (ValueError, LookupError, OSError) as error:
        passed, seen = False, f"no result: {type(error).__name__}: {error}"
    return PASSED if passed and not code else FAILED, seen, measured


def steps(platform: str, quick: bool, runs: Path) -> Iterator[Step]:
    """The steps after the first, in the order of docs/first_hour.md. Trained runs are in the folder `runs`."""
    bench, repeats = ("-m", "rpg_jax.bench"), ("--json", *["--repeats=3"] * quick)
    slow, target = "it would take hours on a CPU" if platform == "cpu" else "", "--config=configs/qwen2p5_0p5b_gsm8k.py"
    on = f"--config.run.platform={platform}"

    def trained(name: str, expected: str, *arguments: str, gap: float, least: float | None = None) -> Step:
        run = name.replace(" ", "-")
        command = ("-m", "rpg_jax.train", *arguments, on, f"--config.run.dir={runs}", f"--config.run.name={run}")
        return Step(name, expected, command, lambda _: _trained(runs / run, gap, least))

    yield Step("kernels", "no kernel differs from plain XLA", (*bench, "kernels", *repeats), _kernels)
    yield Step("step of w1", "0.91 s on two CPU cores", (*bench, "step", "--preset=w1", *repeats), _update)
    yield Step("step of the target", "v5e by plan: 0.81 s", (*bench, "step", target, *repeats), _update, slow)
    for preset, cannot in (("w1", ""), ("qwen3-0.6b", slow)):
        command = (*bench, "rollout", f"--preset={preset}", *repeats)
        yield Step(f"rollout of {preset}", "at least half of lockstep's tokens/s", command, _rollout, cannot)
    tiny, few = "--config=configs/tiny.py", ("--config.train.steps=10",) * quick
    accuracy, least = ("does not fall", None) if quick else ("0.37 to 0.54 → 0.90 to 0.98", 0.85)
    yield trained("tiny", f"accuracy {accuracy}, sampler_gap at most 1e-5", tiny, *few, gap=1e-5, least=least)
    half, gap = ("--config.model.compute_dtype=bfloat16", "--config.train.steps=5"), "sampler_gap at most 0.04"
    yield trained("tiny in bfloat16", f"{gap}; on CPUs 0.004 to 0.006", tiny, *half, gap=0.04)
    table = ("-m", "rpg_jax.reproduce", "--table=small", "--quick", f"--out={runs / 'tables'}", "--", on)
    page = runs / "tables" / "quick" / "small" / "small.md"
    short = ("--config.train.steps=2",) * quick
    yield Step("small table", "a page", (*table, *short), lambda _: (page.exists(), f"the page {page}"))
    yield trained("target in small", "two steps, an evaluation, a reward of 0", f"{target}:tiny", gap=1e-4)


def _devices(platform: str) -> Step:
    def check(measured: list[Json]) -> Verdict:
        found = measured[0]
        versions = f"jax {found['packages']['jax']}, Python {found['python']}"
        return found["platform"] == platform, f"{found['platform']}: {found['devices']}, {versions}"

    return Step("devices", f"every {platform} of the machine", ("-c", _VERSIONS), check)


def _kernels(measured: list[Json]) -> Verdict:
    wrong = [f"{one['name']} in {one['dtype']} of {one['model']}" for one in measured if not one["passed"]]
    largest = max((one["difference"] for one in measured if one["passed"]), default=0.0)
    seen = f"not what XLA computes: {', '.join(wrong)}" if wrong else f"differences of at most {largest:.1e}"
    return not wrong, f"{len(measured)} kernels, {seen}"


def _update(measured: list[Json]) -> Verdict:
    one = measured[0]
    share: float = one.get("share_of_peak", 0.0)
    seen = f"{one['seconds']:.3f} s, {one['tokens_per_s']:,.0f} tokens/s, peak {one['peak_bytes'] / 2**30:.1f} GiB"
    return 0 <= share <= 1, f"{seen}, {share:.0%} of the chip's FLOPs" if share else seen


def _rollout(measured: list[Json]) -> Verdict:
    ours = measured[0]["tokens_per_s"]
    lockstep: Any = measured[0].get("lockstep_tokens_per_s", ours)
    return ours >= 0.5 * lockstep, f"{ours:,.0f} tokens/s, lockstep {lockstep:,.0f}"


def _trained(run: Path, gap: float, least: float | None) -> Verdict:
    """The verdict on a run by its largest `sampler_gap`, at most `gap`, and its last held-out accuracy.

    `least` is the least accuracy that passes; None: the first accuracy, less 0.05 for noise.
    """
    records = read_metrics(run)
    largest = max(record["sampler_gap"] for record in records if "sampler_gap" in record)
    first, *_, last = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    enough = last >= (first - 0.05 if least is None else least)
    return largest <= gap and enough, f"held-out accuracy {first:.2f} → {last:.2f}, sampler_gap {largest:.1e}"


if __name__ == "__main__":
    sys.exit(main())
