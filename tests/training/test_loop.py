"""The loop around the step: what carried groups are trained with, and that a resumed loop is the same loop."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax import data, models, parallel
from rpg_jax.data import Group
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs.rollout_files import RolloutFiles, token_numbers
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training.ahead import AheadCollector
from rpg_jax.training.collect import Collector, DynamicSampling
from rpg_jax.training.loop import Algorithm, take_step
from rpg_jax.training.objective import Objective, advantages_fn, policy_loss_fn
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.reference import Reference, make_rule
from rpg_jax.training.state import abstract, abstract_state, create_state, shardings_of
from rpg_jax.training.step import Rehearsed, make_programs
from rpg_jax.types import Completion, Count

MODEL = models.DecoderConfig(
    vocab_size=16, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, hidden_dim=32
)
PROBLEMS = [data.Problem(i, f"p{i}", "a", "t") for i in range(7)]


class FakeGenerator:
    """Completions that depend on (step, draw, prompt) alone; three quarters of the groups are informative."""

    def __init__(self, rollout):
        self.rollout = rollout

    def __call__(self, problems, *, step, draw=0):
        return [self._group(problem, step, draw) for problem in problems]

    def _group(self, problem, step, draw):
        rng = np.random.default_rng((step, draw, problem.prompt_id))
        completions = [
            Completion(
                rng.integers(4, 16, n).astype(np.int32),
                rng.normal(-2, 0.1, n).astype(np.float32),
                "stop",
                self.rollout.version,
            )
            for n in rng.integers(1, 6, 2)
        ]
        accuracy = np.array([0, rng.random() < 0.75], np.float32)
        prompt = rng.integers(4, 16, 3).astype(np.int32)
        return Group(problem, prompt, completions, ["x", "y"], accuracy + np.float32(0.25), accuracy)

    def take_errors(self):
        return {"timeout": 1}


class FakeRollout:
    version = 0
    weights = SimpleNamespace(stage=lambda params: params, verify=lambda params: None)

    def sync_weights(self, params, version):
        self.version = version


SHAPE = data.RowShape(rows=2, length=8, completion_length=5)


@pytest.fixture(scope="module")
def parts():
    """What all loops of this file share: one compilation."""
    mesh = parallel.make_mesh({}, jax.devices()[:1])
    graphdef, shapes = models.abstract(MODEL)
    param_shardings = parallel.shardings(models.logical_axes(MODEL), shapes, mesh)
    optimizer = make_optimizer(
        "adamw",
        learning_rate=3e-2, warmup=Count(0, "updates"), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    weights = abstract(shapes, param_shardings)
    like = abstract_state(weights, optimizer, NamedSharding(mesh, PartitionSpec()))
    rows = NamedSharding(mesh, PartitionSpec(parallel.RULES["batch"]))
    programs = make_programs(
        graphdef,
        optimizer,
        Objective(policy_loss_fn("rpg", divergence="urkl", estimator="reinforce", kl_coef=0.1)),
        temperature=1.0,
        state=like,
        batch_sharding=rows,
    )
    return dict(optimizer=optimizer, like=like, rows=rows, programs=programs)


class Loop:
    """An algorithm with its state, taken one step at a time."""

    def __init__(self, algorithm, state):
        self.algorithm, self.state, self.step = algorithm, state, 0

    def run_step(self):
        done = take_step(self.algorithm, self.state, self.step + 1)
        self.state, self.step = done.state, done.number
        return done

    def record(self):
        return {**self.algorithm.collector.record(), "reference": self.algorithm.reference.commit(), "step": self.step}

    def restore(self, state, record):
        self.state, self.step = state, record["step"]
        self.algorithm.collector.restore(record)
        self.algorithm.reference.restore(record["reference"])


def make_loop(
    parts, folder, *, dynamic, rule="every", batch_size=8, programs=None, ahead=None, every="2 updates", **more
):
    rule = make_rule({"rule": rule, "every": every, "kl_threshold": 0.1})
    rollout, stream = FakeRollout(), data.PromptStream(PROBLEMS, seed=0)
    take = stream.take
    stream.take = lambda wanted: take(batch_size or wanted)
    made = {"generator": FakeGenerator(rollout), "stream": stream, "prompts_per_step": 2, "dynamic": dynamic}
    algorithm = Algorithm(
        collector=AheadCollector(**made, **ahead) if ahead else Collector(**made),
        pack=functools.partial(data.pack, shape=SHAPE, sharding=parts["rows"]),
        advantages=advantages_fn("group_mean", "rpg"),
        programs=programs or parts["programs"],
        reference=Reference(rule, snapshots=Snapshots(folder / "reference"), like=parts["like"].params),
        updates_per_step=2,
        **more,
    )
    params = models.init(MODEL, seed=3, shardings=shardings_of(parts["like"].params))[1]
    return Loop(algorithm, create_state(params, parts["optimizer"], parts["like"]))


class Recorder:
    """Programs that note the micro-batches of every update."""

    def __init__(self, programs):
        self.programs, self.logprobs, self.baseline, self.seen = programs, programs.logprobs, programs.baseline, []

    def update(self, state, micro_batches, anchor=None):
        self.seen += micro_batches
        return self.programs.update(state, micro_batches, anchor)


@pytest.mark.slow
def test_a_reference_that_moves_every_second_step_counts_the_loops_steps(parts, tmp_path):
    loop = make_loop(parts, tmp_path, dynamic=None, every="2 steps")
    assert [loop.run_step().metrics["reference_update"] for _ in range(3)] == [0, 4, 4]


def test_every_update_of_a_run_rehearses_by_its_number(parts, tmp_path):
    tokens = Completion(np.array([4, 1], np.int32), np.zeros(2, np.float32), "stop", 0)
    group = data.unscored(data.Problem(0, "1+1=", "2", ""), np.array([3]), [tokens])
    numbers, kept = [], data.pack([group], SHAPE, sharding=parts["rows"])

    def rehearsal(number):
        numbers.append(number)
        return Rehearsed(kept.batches, 0.1)

    loop = make_loop(parts, tmp_path, dynamic=None, rehearsal=rehearsal)
    metrics = [loop.run_step().metrics for _ in range(2)]
    assert numbers == [0, 1, 2, 3] and all(step["rehearsal_nll"] > 0 for step in metrics)


@pytest.mark.parametrize("rule", ["behaviour", "every"])
def test_carried_groups_are_trained_with_the_logprobs_of_the_weights_that_sampled_them(parts, tmp_path, rule):
    recorder, dynamic = Recorder(parts["programs"]), DynamicSampling(surplus="carry")
    loop = make_loop(parts, tmp_path, dynamic=dynamic, rule=rule, batch_size=7, programs=recorder)
    before = jax.tree.map(np.array, loop.state.params)
    loop.run_step()
    carried = loop.algorithm.collector.carried
    after = jax.tree.map(np.array, loop.state.params)
    assert len(carried) == 2
    recorder.seen.clear()
    done = loop.run_step()
    assert done.groups == [] and done.metrics["staleness"] == 1.0 and "reward" not in done.metrics
    assert len(recorder.seen) == 2  # one group each, in order
    for group, batch in zip(carried, recorder.seen, strict=True):
        chosen = np.asarray(batch.mask) > 0
        old, new = (np.asarray(parts["programs"].logprobs(p, batch.rows)[0])[chosen] for p in (before, after))
        assert np.max(np.abs(old - new)) > 1e-2, "the update moved the weights"
        np.testing.assert_allclose(np.asarray(batch.behaviour_logprobs)[chosen], old, atol=1e-6)
        # The reference of rule "behaviour" is the policy that sampled; that of "every 2 updates" moved with the step.
        anchor = old if rule == "behaviour" else new
        np.testing.assert_allclose(np.asarray(batch.ref_logprobs)[chosen], anchor, atol=1e-6)
        assert sorted(len(c.tokens) for c in group.completions) == sorted(chosen.sum(axis=1))


@pytest.mark.parametrize(
    ("surplus", "max_staleness"),
    [
        ("needed", 0),
        ("drop", 0),
        ("carry", 2),
        pytest.param("carry", 0, marks=pytest.mark.slow),
        pytest.param("needed", 1, marks=pytest.mark.slow),
        pytest.param("drop", 1, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_loop_is_the_same_loop_in_the_middle_of_an_epoch(parts, tmp_path, surplus, max_staleness):
    """Seven problems in batches of three: no step ends where an epoch does, and groups are carried over."""
    ahead = {"max_staleness": max_staleness, "steps": 6} if max_staleness else None

    def make(folder):
        # batches of three are the stream's; "needed" asks for as many as the share seen last calls for
        needed = surplus == "needed"
        dynamic = DynamicSampling(0, surplus="carry") if needed else DynamicSampling(surplus=surplus)
        return make_loop(parts, folder, dynamic=dynamic, batch_size=0 if needed else 3, ahead=ahead)

    straight, carried_seen = make(tmp_path), 0
    history = []
    for _ in range(6):
        record, state = straight.record(), jax.tree.map(np.array, straight.state)
        carried_seen += len((record["ahead"] or {"carried": record["pending"]})["carried"])
        history.append((record, state, straight.run_step().metrics))
    assert (carried_seen > 0) == (surplus != "drop")
    for record, state, expected in history[2:5:2]:
        resumed = make(tmp_path)
        resumed.restore(jax.device_put(state, shardings_of(parts["like"])), record)
        values = resumed.run_step().metrics
        assert untimed(values) == untimed(expected)
        assert values.get("staleness_updates_max", 0) <= 2 * (max_staleness + (surplus != "drop"))
        while resumed.step < straight.step:
            resumed.run_step()
        assert weights_checksum(resumed.state) == weights_checksum(straight.state)
        assert resumed.record() == straight.record()


def untimed(values):
    return {k: v for k, v in values.items() if not k.startswith("time/") and k not in ("seconds", "tokens_per_second")}


def test_keeping_rollouts_changes_no_bit_of_the_run(parts, tmp_path):
    def trained(folder, keep):
        more = {}
        if keep:
            letters = type("Letters", (), {"decode": lambda self, ids: "".join(map(str, ids))})()
            numbers = token_numbers("rpg", divergence="urkl", estimator="reinforce", kl_coef=0.1)
            files = RolloutFiles(folder, letters, parts["programs"].logprobs, numbers, every=1, groups=9)
            more = {"after_updates": files.after_updates}
        loop = make_loop(parts, folder, dynamic=DynamicSampling(surplus="carry"), batch_size=3, **more)
        return loop, [untimed(loop.run_step().metrics) for _ in range(3)]

    (plain, values), (kept, same) = trained(tmp_path / "plain", False), trained(tmp_path / "kept", True)
    assert values == same and weights_checksum(plain.state) == weights_checksum(kept.state)
    assert plain.record() == kept.record() and len(list((tmp_path / "kept/rollouts").iterdir())) == 3


def test_rule_kl_watches_the_kl_that_is_reported_of_each_update(parts, tmp_path, monkeypatch):
    recorder, watched = Recorder(parts["programs"]), []
    loop = make_loop(parts, tmp_path, dynamic=None, rule="kl", batch_size=2, programs=recorder)
    monkeypatch.setattr(loop.algorithm.reference, "after_step", watched.extend)
    values = loop.run_step().metrics
    tokens = [float(batch.mask.sum()) for batch in recorder.seen]
    assert values["kl"] == pytest.approx(np.average(watched, weights=tokens), rel=1e-5)  # f32
    assert values["kl"] != pytest.approx(values["kl_k3"], rel=1e-3) and watched[1] > 1e-4


def test_every_micro_batch_and_every_update_is_a_heartbeat(parts, tmp_path, monkeypatch):
    beats, fused = [], parts["programs"].fused
    programs = parts["programs"]._replace(fused=lambda *a: (beats.append("update"), fused(*a))[1])
    monkeypatch.setattr("rpg_jax.training.loop.beat", functools.partial(beats.append, "beat"))
    make_loop(parts, tmp_path, dynamic=None, batch_size=2, programs=programs).run_step()
    assert beats == ["beat"] * 2 + ["update"] * 2 + ["beat"] * 2  # log-probs of two micro-batches; both updates ended


def test_failed_verdicts_are_metrics_by_kind(parts, tmp_path):
    assert make_loop(parts, tmp_path, dynamic=None, batch_size=2).run_step().metrics["verifier_errors/timeout"] == 1


def test_a_shortage_makes_fewer_groups_and_no_empty_update(parts, tmp_path):
    loop = make_loop(parts, tmp_path, dynamic=DynamicSampling(max_batches=1), batch_size=1)
    trained = []
    while 1 not in trained:
        try:
            trained.append(loop.run_step().metrics["groups_trained"])
        except ValueError as error:
            assert "kept 0 of 2" in str(error)
    assert int(loop.state.updates) == sum(trained)


def test_a_step_is_recorded_with_its_updates_and_its_groups(parts, tmp_path):
    loop = make_loop(parts, tmp_path, dynamic=None, batch_size=2)
    step = take_step(loop.algorithm, loop.state, 3)
    assert (step.number, int(step.state.updates), len(step.updates), len(step.groups)) == (3, 2, 2, 2)


@pytest.mark.parametrize("fault", [None, "sampler and trainer disagree"])
def test_the_rollout_gets_the_weights_of_a_step_after_the_guard_has_let_it_pass(parts, tmp_path, fault):
    asked, loop = [], None

    def guard(number, values, updates):
        asked.append((number, values["sampler_gap"], len(updates), loop.algorithm.collector.rollout.version))
        return fault

    loop = make_loop(parts, tmp_path, dynamic=None, batch_size=2, fault=guard)
    step = loop.run_step()
    assert step.fault == fault and asked == [(1, step.metrics["sampler_gap"], 2, 0)] and asked[0][1] > 0
    assert loop.algorithm.collector.rollout.version == (2 if fault is None else 0)
