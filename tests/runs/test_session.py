"""A compilation counts once; chosen steps leave a trace; a device without memory leaves its profile and the fix."""

import jax
import jax.numpy as jnp
import pytest

from rpg_jax.runs import cli
from rpg_jax.runs.session import CompilationCounter, _in_words, chosen_steps, watched


def test_one_step_or_a_range_is_traced():
    assert list(chosen_steps("12")) == [12] and list(chosen_steps("12-14")) == [12, 13, 14] and not chosen_steps(None)
    for text in ("", "a", "5-3", "1,2"):
        with pytest.raises(ValueError, match="profile.steps is one step or a range"):
            chosen_steps(text)


def test_an_accuracy_of_several_held_out_sets_says_that_it_is_their_mean():
    values = {"eval/accuracy": 0.5, "eval/held out/mean_at_k": 0.3}  # a set may have the name "held out"
    assert _in_words(values) == "held-out accuracy 0.500"
    assert _in_words(values | {"eval/old/mean_at_k": 0.7}) == "held-out accuracy, mean of 2 sets, 0.500"


def test_only_chosen_steps_leave_a_trace(tmp_path):
    for step in (1, 2):
        with watched(step, range(2, 3), tmp_path / str(step)):
            jax.block_until_ready(jnp.ones(3) + 1)
    assert not (tmp_path / "1").exists() and list((tmp_path / "2" / "profile").rglob("*.xplane.pb"))


def test_running_out_of_memory_names_the_fix_and_other_errors_pass(tmp_path):
    with pytest.raises(cli.Ended, match="step 3: .*smaller train.microbatch_size"), watched(3, range(0), tmp_path):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 10 bytes")
    assert (tmp_path / "memory.prof").stat().st_size > 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), watched(3, range(0), tmp_path):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_a_new_shape_is_a_compilation_and_the_same_shape_is_not():
    counter = CompilationCounter()
    double = jax.jit(lambda x: 2 * x)
    three, four = jnp.ones(3), jnp.ones(4)
    counter.take()
    double(three), double(three)
    programs, seconds = counter.take()
    assert len(programs) == 1 and seconds > 0
    double(three)
    assert counter.take() == ([], 0.0)
    double(four)
    assert len(counter.take()[0]) == 1
