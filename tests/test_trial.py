"""A step's share follows the costs' advice, unless steps get longer by it."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.engine.trial import Trial

NO_NOISE = SimpleNamespace(uniform=lambda low, high: 1.0)
NOISE = st.integers(0, 2**32).map(random.Random)


def shares_of(trial, rng, num_steps, seconds_at, wanted, gain, current=0.7):
    """Shares of so many steps, each of which takes `seconds_at` its share, give or take 2 %."""
    shares = []
    for _ in range(num_steps):
        trial.note(seconds_at(current) * rng.uniform(0.98, 1.02))
        current = trial.next_share(current, wanted, gain if current != wanted else 1.0)
        shares.append(current)
    return shares


@given(NOISE, st.floats(1.05, 2), st.floats(1.03, 3))
def test_a_change_that_shortens_steps_stays(rng, faster, promised):
    trial = Trial()
    shares = shares_of(trial, rng, 40, lambda s: 1.0 if s == 0.7 else 1 / faster, 0.6, promised)
    assert shares == 2 * [0.7] + 38 * [0.6]


@given(NOISE, st.floats(1.1, 3), st.floats(1.03, 3))
def test_a_change_that_lengthens_steps_is_taken_back_and_seldom_made_again(rng, slower, promised):
    trial = Trial()
    shares = shares_of(trial, rng, 300, lambda s: 1.0 if s == 0.7 else slower, 0.6, promised)
    assert shares.count(0.6) <= 0.12 * len(shares)
    assert 0.6 in shares[150:]  # whatever it was may have ended


def test_a_better_promise_than_one_that_was_not_kept_is_tried_at_once():
    trial = Trial()
    shares_of(trial, NO_NOISE, 3, lambda share: 1.0, 0.6, 1.1)
    assert shares_of(trial, NO_NOISE, 6, lambda share: 1.5, 0.6, 1.1, current=0.6)[-1] == 0.7
    assert set(shares_of(trial, NO_NOISE, 10, lambda share: 1.0, 0.6, 1.15)) == {0.7}
    assert shares_of(trial, NO_NOISE, 1, lambda share: 1.0, 0.5, 1.25) == [0.5]


@pytest.mark.parametrize("gain", [1.0, 1.02])
def test_nothing_changes_for_next_to_nothing(gain):
    trial = Trial()
    for _ in range(20):
        trial.note(1.0)
        assert trial.next_share(0.7, 0.6, gain) == 0.7


def test_where_steps_are_not_timed_the_costs_are_believed():
    trial = Trial()
    for share in (0.6, 0.5, 0.4):
        assert trial.next_share(0.7, share, 1.1) == share
    for _ in range(20):
        trial.note(9.0)
        assert trial.next_share(0.4, 0.4, 1.0) == 0.4


def test_the_first_steps_at_a_share_prepare_it_and_do_not_count():
    trial = Trial()
    assert shares_of(trial, NO_NOISE, 3, lambda share: 1.0, 0.6, 1.1) == [0.7, 0.7, 0.6]
    for seconds in (5.0, 5.0, 5.0, 0.9, 0.9, 0.9):
        trial.note(seconds)
        assert trial.next_share(0.6, 0.6, 1.0) == 0.6
