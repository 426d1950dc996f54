"""The learning rate of a step."""

from itertools import pairwise

import pytest

from nsa.config.schema import TrainConfig
from nsa.train.schedule import learning_rate


def rates(**options):
    train = TrainConfig(steps=100, lr=1.0, min_lr_ratio=0.1, warmup_steps=10, **options)
    return [learning_rate(step, train) for step in range(100)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_rate(schedule):
    assert rates(schedule=schedule)[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])


def test_cosine_falls_from_the_rate_to_its_floor():
    values = rates(schedule="cosine")
    assert values[10] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert values[10:] == sorted(values[10:], reverse=True)
    middle = TrainConfig(steps=101, lr=1.0, min_lr_ratio=0.1, schedule="cosine")
    assert learning_rate(50, middle) == pytest.approx(0.55)


def test_wsd_holds_the_rate_then_falls_in_a_line():
    values = rates(schedule="wsd", decay_fraction=0.2)
    assert values[10:81] == pytest.approx([1.0] * 71)
    assert values[-1] == pytest.approx(0.1)
    steps = [a - b for a, b in pairwise(values[80:])]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_a_short_trial_of_a_long_run_stays_in_its_warm_up():
    trial = TrainConfig(steps=10, lr=1.0, warmup_steps=100)
    assert [learning_rate(step, trial) for step in range(10)] == pytest.approx([(i + 1) / 100 for i in range(10)])
