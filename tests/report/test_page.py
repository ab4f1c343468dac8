"""report.html before a browser reads it: what is compared, what is packed, and that no text can become markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rpg_jax.report import __main__ as report
from rpg_jax.report import page, rollouts, tables
from rpg_jax.report.run_files import Run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028%DATA%%CHUNKS%"


class Elements(HTMLParser):
    """Tags with their attributes, and the content of scripts by id and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self._open = attributes.get("id", tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


def read(folders):
    return tables.configs_of([Run.read(folder) for folder in folders])


def test_seeds_of_a_config_are_grouped_and_configs_named_by_what_tells_them_apart(leave_run, tmp_path):
    a, b = leave_run(tmp_path / "a", seed=0), leave_run(tmp_path / "b", seed=1)
    c = leave_run(tmp_path / "c", config={"loss": {"kl_coef": 0.2}})
    d = leave_run(tmp_path / "d", config={"method": "DAPO", "loss": {}})
    configs = read([a, c, b, d])
    assert [(g.label, [r.name for r in g.runs]) for g in configs] == [
        ("GRPO, kl_coef 0.1", ["a", "b"]),
        ("GRPO, kl_coef 0.2", ["c"]),
        ("DAPO", ["d"]),
    ]
    assert tables.differences(configs) == [
        {"field": "loss.kl_coef", "values": ["0.1", "0.2", "–"]},
        {"field": "method", "values": ["GRPO", "GRPO", "DAPO"]},
    ]


def test_curves_have_the_range_of_the_seeds_and_dots_where_it_was_evaluated(leave_run, tmp_path):
    panels = page.dynamics(read([leave_run(tmp_path / f"{s}", seed=s, accuracy=0.4 + 0.2 * s) for s in range(2)]))
    by_title = {panel["title"]: panel["curves"][0] for panel in panels}
    accuracy = by_title["Accuracy"]
    assert accuracy["steps"] == list(range(1, 11)) and accuracy["mean"][4] == pytest.approx(50)
    assert accuracy["low"][4] == pytest.approx(40) and accuracy["high"][4] == pytest.approx(60)
    assert accuracy["held_out"] == [[0, pytest.approx(25)], [5, pytest.approx(50)], [10, pytest.approx(48)]]
    assert "Clipped" not in by_title, "no run has it"


def test_a_run_on_demonstrations_shows_its_loss_and_its_held_out_accuracy_and_is_named_supervised():
    records = [{"step": step, "nll": 4.0 - step, "epoch": step / 2} for step in range(1, 4)]
    first, last = ({"held_out_nll": 5.0, "eval/accuracy": accuracy} for accuracy in (0.1, 0.3))
    run = Run("sft", 0, {"method": "GRPO"}, [{"step": 0, **first}, *records[:2], records[2] | last])
    (config,) = tables.configs_of([run])
    by_title = {panel["title"]: panel["curves"][0] for panel in page.dynamics([config])}
    assert by_title["Loss"]["mean"] == [3, 2, 1] and by_title["Loss"]["held_out"] == [[0, 5], [3, 5]]
    assert by_title["Accuracy"]["steps"] == [0, 3] and by_title["Accuracy"]["mean"] == pytest.approx([10, 30])
    assert config.label == "supervised"


def test_each_step_that_is_drawn_has_its_place_whatever_the_number_of_steps(leave_run, tmp_path):
    folder = leave_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1000000000000, "reward": 1.0, "seconds": 1.0}\n')
    data = page._page_data(read([folder]), rollout_steps=0)[0]
    costs = {axis["name"]: axis["costs"][0] for axis in data["axes"]}
    assert costs["steps"] == {step: step for step in (*range(11), 10**12)}
    assert list(costs["seconds"].values()) == pytest.approx([*range(11), 11])


def test_time_leaves_out_the_step_that_compiles(leave_run, tmp_path):
    found = page.timing(read([leave_run(tmp_path / "a")]))
    row = found["rows"][0]
    assert found["parts"] == ["rollout", "update", "evaluation"]
    assert row["seconds"] == pytest.approx([0.6, 0.3, 2 * 0.9 / 9])  # two evaluations, spread over nine steps
    assert (row["total"], row["tokens_per_second"], row["compiling"]) == pytest.approx((1.2, 100.0, 5.0))


def test_time_leaves_out_each_step_that_compiles_after_a_restart(tmp_path):
    usual = {"seconds": 10.0, "time/rollout": 6.0, "time/compiling": 0.0, "tokens_per_second": 100.0}
    first = {"seconds": 310.0, "time/rollout": 306.0, "time/compiling": 300.0, "tokens_per_second": 3.0}
    records = [{"step": step, **(first if step in (1, 4, 7) else usual)} for step in range(1, 10)]
    (row,) = page.timing(tables.configs_of([Run("a", 0, {}, records)]))["rows"]
    assert (row["total"], row["seconds"], row["tokens_per_second"], row["compiling"]) == (10, [6], 100, 900)


def test_packed_rollouts_are_the_file_to_twelve_bits(leave_run, tmp_path):
    file = leave_run(tmp_path / "a") / "rollouts/000010.npz"
    own = rollouts.Rollouts.read(file)
    content = gzip.decompress(base64.b64decode(own.packed))
    size = int.from_bytes(content[:4], "little")
    head, n = json.loads(content[4 : 4 + size]), sum(own.lengths)
    assert (head["step"], head["weights"], head["sizes"], len(head["verdicts"])) == (10, 20, [4] * 4, 16)
    for i, name in enumerate(rollouts.NUMBERS):
        planes = np.frombuffer(content, np.uint8, 4 * n, 4 + size + 4 * n * i).reshape(4, n)
        values = np.ascontiguousarray(planes.T).view("<f4")[:, 0]
        np.testing.assert_allclose(values, own.numbers[name], rtol=2**-12)  # half of the last bit kept
    rest = content[4 + size + 4 * n * len(rollouts.NUMBERS) :]
    pieces = [head["pieces"][i] for i in np.frombuffer(rest[: 4 * n], "<i4")]
    assert "".join(pieces[:6]) == "".join(own.text["pieces"][i] for i in own.pieces[:6])
    assert np.frombuffer(rest[4 * n :], np.uint8).tolist() == own.clip.tolist()


def test_kept_steps_are_the_first_the_last_and_some_between(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step in (1, 10, 20, 30, 1_000_000):
        (tmp_path / f"rollouts/{step:06d}.npz").touch()
    assert [int(file.stem) for file in rollouts.files(tmp_path, steps=3)] == [1, 20, 1_000_000]
    assert rollouts.files(tmp_path / "none", steps=3) == []


def test_colours_end_at_round_numbers():
    found = rollouts.scales([{name: np.array([0.0, -0.3, np.nan]) for name in rollouts.NUMBERS}])
    assert found["gap"] == 0.5
    assert rollouts.scales([])["kl"] == 1.0


def test_text_of_runs_stays_text(leave_run, tmp_path):
    folder = leave_run(
        tmp_path / "<script>alert(0)<script>", texts=[EVIL, "\u2029"], prompt=EVIL + "{}", config={"method": EVIL}
    )
    text = page.write_page([Run.read(folder)], tmp_path / "out/report.html").read_text(encoding="utf-8")
    found = Elements(text)
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert scripts == [
        {"type": "application/json", "id": "data"},
        *({"type": "text/plain", "id": f"chunk-{i}"} for i in range(2)),
        {},
    ]
    assert not any(tag == "img" or name.startswith("on") for tag, own in found.tags for name in own)
    assert "\u2028" not in text and "\u2029" not in text
    data = json.loads(found.scripts["data"])
    assert data["runs"][0]["name"] == "<script>alert(0)<script>" and data["configs"] == [EVIL]
    assert "&lt;script&gt;alert(0)&lt;script&gt; (10 steps)" in text and text.count("&lt;/script&gt;") >= 4, "in tables"


def test_the_policy_names_our_script_and_style_and_no_source_else(leave_run, tmp_path):
    text = page.write_page([Run.read(leave_run(tmp_path / "a"))], tmp_path / "report.html").read_text(encoding="utf-8")
    found = Elements(text)
    policy = next(own["content"] for tag, own in found.tags if own.get("http-equiv") == "Content-Security-Policy")
    for kind, content in (("script", found.scripts["script"]), ("style", found.scripts["style"])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "http" not in policy and "unsafe" not in policy
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name, which nothing fetches"
    assert not [own for _, own in found.tags if own.keys() & {"src", "srcset"}]


def test_without_scripts_the_page_has_its_tables(leave_run, tmp_path):
    text = page.write_page([Run.read(leave_run(tmp_path / "a"))], tmp_path / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", body)
    assert "<span>48.0</span><small></small>" in cells and "step 10" in cells, "Last, and the step that it is of"
    assert "0.600<small>50 %</small>" in cells, "time of a step"
    assert 'value="steps" checked' in body and "No value is bold" not in body


def test_the_same_runs_give_the_same_page(leave_run, tmp_path):
    run = Run.read(leave_run(tmp_path / "a"))
    first, second = (page.write_page([run], tmp_path / name).read_bytes() for name in ("1.html", "2.html"))
    assert first == second


def test_a_broken_rollout_file_is_named(leave_run, tmp_path, capsys):
    run = leave_run(tmp_path / "a")
    file = run / "rollouts/000001.npz"
    file.write_bytes(file.read_bytes()[:100])
    assert report.main([str(run)]) == 0
    assert f"left out: {file} is not a whole rollout file" in capsys.readouterr().err
    assert (run / "report.html").read_text(encoding="utf-8").count('id="chunk-') == 1, "the other file is shown"


def test_the_web_files_are_package_data():
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]["rpg_jax"]
    packaged = {file for pattern in patterns for file in (root / "rpg_jax").glob(pattern)}
    assert set(page.WEB.iterdir()) <= packaged
