import math

from rpg_jax.report import costs

RECORDS = [
    {"step": 1, "seconds": 9.0, "time/compiling": 20.0, "groups_generated": 4, "accuracy": 0.1},
    {"step": 2, "seconds": 2.0, "groups_generated": 6, "accuracy": 0.2},
    {"step": 3, "seconds": 4.0, "time/compiling": 0.0, "groups_generated": 4, "accuracy": 0.4},
]


def test_a_step_that_compiled_costs_the_median_of_the_others():
    assert costs.seconds(RECORDS) == [3.0, 5.0, 9.0]
    assert math.isnan(costs.seconds(RECORDS[:1])[0])


def test_completions_add_up_and_a_late_metric_is_of_the_last_third():
    assert costs.completions(RECORDS, 8) == [32, 80, 112]
    assert costs.late(RECORDS, "accuracy") == 0.4
    assert costs.late([*RECORDS, *RECORDS], "accuracy") == (0.2 + 0.4) / 2
    assert math.isnan(costs.late(RECORDS, "kl"))
