"""A run folder is enough to draw its pages again."""

import json
import os

from rpg_jax.report import __main__ as report


def test_curves_and_summary_are_made_again_from_the_logs(tmp_path, capsys):
    scores = [{"eval/held_out/mean_at_k": 0.5 + 0.1 * s, "eval/held_out/pass_at_k": 1.0} for s in (0, 1, 2)]
    records = [{"step": s, "reward": 0.1 * s, **own} for s, own in enumerate(scores)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert report.main([str(tmp_path)]) == 0
    assert "held_out accuracy: 0.500 (step 0) → 0.700 (step 2)" in capsys.readouterr().out
    assert "<table" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "curves.png").stat().st_size > 0 and "0.7000" in (tmp_path / "summary.md").read_text(
        encoding="utf-8"
    )


def test_several_runs_share_a_page_where_it_is_asked_for(leave_run, tmp_path, capsys):
    runs = [leave_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    out = tmp_path / "pages" / "both.html"
    assert report.main([*map(str, runs), f"--out={out}", "--rollout-steps=1"]) == 0
    assert f"page: {out}" in capsys.readouterr().out and out.read_text(encoding="utf-8").count('id="chunk-') == 2
    assert all((run / "summary.md").exists() for run in runs)


def test_a_folder_without_steps_is_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert f"left out: {tmp_path}: it has no step" in errors and "none of these runs has a step" in errors


def test_a_run_without_steps_leaves_the_others_their_page(leave_run, tmp_path, capsys):
    run, empty = leave_run(tmp_path / "run"), tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}", encoding="utf-8")
    for stray in ("notes.npz", "best-10.npz", os.fsdecode("٣.npz".encode()), "1e3.npz"):  # a person's own files
        (run / "rollouts" / stray).write_text("mine", encoding="utf-8")
    assert report.main([str(empty), str(run)]) == 0
    assert "<table" in (run / "report.html").read_text(encoding="utf-8") and not (empty / "report.html").exists()
    assert f"left out: {empty}: it has no step" in capsys.readouterr().err


def test_a_negative_number_of_steps_is_refused_under_its_flag(leave_run, tmp_path, capsys):
    run = leave_run(tmp_path / "run")
    assert report.main([str(run), "--rollout-steps=-1"]) == 2
    assert "--rollout-steps: -1 must be at least 0" in capsys.readouterr().err and not (run / "curves.png").exists()


def test_a_full_disk_and_a_wrong_flag_are_one_line_with_the_exit_code_of_every_command(
    leave_run, tmp_path, monkeypatch, capsys
):
    run = str(leave_run(tmp_path / "run"))
    assert report.main([f"--run={run}"]) == 2
    assert capsys.readouterr().err == "error: the following arguments are required: runs/NAME\n"
    assert report.main([run, "--rollout-step=1"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown flag --rollout-step; did you mean --rollout-steps? --help lists all flags\n"
    )

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(report.page, "write_atomically", full)
    assert report.main([run]) == 1
    assert capsys.readouterr().err == f"error: No space left on device: {run}/report.html\n"
