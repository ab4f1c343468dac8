"""Runs with a judge over HTTP that fails on some completions, for a time or for ever, or on half of them."""

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.end_to_end.test_train import checksum, metrics, run

SETTINGS = (
    "--config.rewards.parts=judge:0.5,exact:0.5",
    "--config.rewards.accuracy=exact",
    "--config.judge.kind=score",
    "--config.judge.batch=1",
    "--config.judge.parallel=4",
    "--config.train.steps=3",
    "--config.evaluation.every=3",
    "--config.checkpoint.every=1",
    "--config.run.name=r",
)


@pytest.fixture
def judge():
    """Starts a judge that never answers on the share `ever` of completions, and at first not on half of the others."""
    servers = []

    def start(ever):
        seen, lock = set(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                share = zlib.crc32(asked) / 2**32
                with lock:
                    first = asked not in seen
                    seen.add(asked)
                fails = share < ever or (first and share < (1 + ever) / 2)
                text = b"" if fails else json.dumps({"scores": [round(share, 2)]}).encode()
                self.send_response(503 if fails else 200)
                self.send_header("Retry-After", "1000")  # beyond the deadline: a request is sent once
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"--config.judge.url=http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_run_trains_what_a_flaky_judge_has_judged_and_says_how_much_it_left_out(warm, tmp_path, judge):
    done = run(warm, tmp_path, *SETTINGS, judge(0.15))
    lines = metrics(tmp_path / "r")
    for line in lines[1:]:
        assert 0 <= line["failed"] < 0.5 and line["skipped_updates"] == 0  # which texts a step has, a processor decides
        completions = 4 * line["groups_generated"]
        twice = round(line["failed"] * completions)
        assert line["verifier_errors/status"] > 2 * twice, "others failed once"
        assert 0 <= line["accuracy"] <= 1 and 0 < line["reward"] < 1
    assert sum(line["failed"] for line in lines[1:]) > 0
    samples = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {s.get("failed") for s in samples} == {None, "status"}
    assert all(s["reward"] <= 0.5 for s in samples if s.get("failed"))
    assert "completions of held out have no verdict" not in done.stderr, "exact decides accuracy"
    again = run(warm, tmp_path / "again", *SETTINGS, judge(0.15))
    assert checksum(again) == checksum(done), "what failed for ever failed for ever"


@pytest.mark.slow
def test_an_evaluation_counts_what_has_no_verdict_as_wrong_and_says_how_much(warm, tmp_path, judge):
    alone = ("--config.rewards.parts=judge", "--config.rewards.right_above=0.5", "--config.rewards.accuracy=judge")
    done = run(warm, tmp_path, *SETTINGS, *alone, judge(0.1), "--config.dynamic_sampling.enabled=False")
    for line in (metrics(tmp_path / "r")[0], metrics(tmp_path / "r")[-1]):
        missing = line["eval/held out/no_verdict"]
        assert 0 < missing < 64 and line["eval/held out/mean_at_k"] <= 1 - missing / 64
        assert (
            f"note: {missing} of 64 completions of held out have no verdict and count as wrong ({missing} status)"
            in (done.stderr)
        )


@pytest.mark.slow
def test_a_run_whose_judge_is_half_down_ends_with_one_line_and_goes_on_once_it_is_up(warm, tmp_path, judge):
    done = run(warm, tmp_path, *SETTINGS, judge(0.5), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error: step 1: ") and "completions have no verdict (" in line
    assert " status), more than rewards.max_failures=0.25. Look at the judge, the verifier" in line
    assert len(metrics(tmp_path / "r")) == 1, "the evaluation before the first step"
    run(warm, tmp_path, *SETTINGS, judge(0.0))
    assert [line["step"] for line in metrics(tmp_path / "r")] == [0, 1, 2, 3]
