"""Fresh pairs of processes on loopback against one process, three rollouts and updates a repetition.

  python -m tests.end_to_end.soak --pairs=10 --repetitions=5

Eight virtual devices in all; the drivers take turns. Stops at the first mismatch, and at a pair that takes longer than
--patience.
"""

import argparse
import collections
import statistics
import tempfile
import time
from pathlib import Path

from tests.end_to_end.test_processes import assert_same_run, printed, run, samples, start

DRIVERS = ("orchestrator", "lockstep")
SETTINGS = (
    "--config.log.samples_per_step=1000",
    "--config.loss.kl_coef=1e-3",
    "--config.optimizer.learning_rate=1e-5",  # what gradients summed in another order move stays below a token's flip
    "--config.evaluation.every=1000",
    "--config.checkpoint.every=1000",
)


def seconds_of_pair(folder, name, steps, driver, patience):
    """Raises AssertionError where it fails or differs, TimeoutExpired where it hangs."""
    began = time.monotonic()
    pair = start(folder, 2, *SETTINGS, steps, f"--config.rollout.driver={driver}", f"--config.run.name={name}")
    outputs = printed(pair, patience)
    assert all(process.returncode == 0 for process in pair), "\n".join(outputs)
    assert_same_run(folder / "one", folder / name)
    return time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="of fresh processes")
    parser.add_argument("--repetitions", type=int, default=5, help="in each pair")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a pair counts as hung")
    arguments = parser.parse_args()
    steps = f"--config.train.steps={3 * arguments.repetitions}"
    seconds = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(folder, 1, *SETTINGS, steps, "--config.run.name=one")
        print(f"one process: {len(samples(folder / 'one'))} completions", flush=True)
        for i in range(arguments.pairs):
            driver = DRIVERS[i % len(DRIVERS)]
            seconds[driver].append(seconds_of_pair(folder, f"pair-{i}", steps, driver, arguments.patience))
            print(f"pair {i + 1}, {driver}: as one process, {seconds[driver][-1]:.1f} s", flush=True)
    for driver, values in seconds.items():
        print(f"{driver}: {len(values)} pairs, median {statistics.median(values):.1f} s, longest {max(values):.1f} s")


if __name__ == "__main__":
    main()
