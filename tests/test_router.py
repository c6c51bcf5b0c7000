"""ShareRouter: the running share stays with its target, whatever the target does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import shares

from sparsekv.errors import LayoutError
from sparsekv.roofline import ShareRouter

SLACK = 1e-6


@given(st.lists(shares(), max_size=300))
def test_the_count_follows_the_sum_of_shares_also_while_they_change(targets):
    router, count, total = ShareRouter(0.5), 0, 0.0
    for share in targets:
        router.marginal_share = share
        count += router.route() == "unpinned"
        total += share
        assert abs(count - total) < 1
        assert abs(count - total) <= 0.5 + SLACK
        assert router.error == pytest.approx(total - count, abs=SLACK)


@given(shares(), st.integers(0, 400))
def test_n_segments_at_a_constant_share_give_round_pn(share, num_segments):
    router = ShareRouter(share)
    count = sum(router.route() == "unpinned" for _ in range(num_segments))
    exact = share * num_segments
    nearest = math.floor(exact + 0.5)
    assert count == nearest or abs(abs(exact % 1) - 0.5) < SLACK
    assert abs(count - exact) <= 0.5 + SLACK


@given(shares(), st.integers(0, 30), st.integers(0, 400))
def test_what_is_expected_of_a_constant_share_is_what_comes(share, before, num_segments):
    router = ShareRouter(share)
    for _ in range(before):
        router.route()
    expected, exact = router.count_pinned(num_segments), router.error + share * num_segments
    count = sum(router.route() == "pinned" for _ in range(num_segments))
    assert 0 <= expected <= num_segments
    assert count == expected or abs(abs(exact % 1) - 0.5) < SLACK


@given(shares(), st.lists(st.booleans(), max_size=60))
def test_diverted_segments_are_made_up_for_by_half_a_segment_at_most(share, refused):
    router = ShareRouter(share)
    for is_refused in refused:
        if router.route() == "pinned" and is_refused:
            router.divert()
        assert abs(router.error) <= 0.5 + SLACK
    left = 1.0 - share
    later = [router.route() for _ in range(40)]
    assert abs(later.count("pinned") - 40 * left) <= 1 + SLACK


@pytest.mark.parametrize("tenths", range(11))
def test_tenths_do_not_drift(tenths):
    router = ShareRouter(tenths / 10)
    for decade in range(1, 2001):
        routed = [router.route() for _ in range(10)]
        assert routed.count("unpinned") == tenths, f"decade {decade}"


def test_both_ends_send_everything_to_one_side():
    assert {ShareRouter(0).route() for _ in range(5)} == {"pinned"}
    assert {ShareRouter(1).route() for _ in range(5)} == {"unpinned"}
    router = ShareRouter(1)
    assert [router.route() for _ in range(3)] == ["unpinned"] * 3


@pytest.mark.parametrize("share", [-1e-9, 1.1, float("nan"), float("-inf"), True, "1", None])
def test_other_shares_are_refused_and_change_nothing(share):
    with pytest.raises(LayoutError, match="marginal_share="):
        ShareRouter(share)
    router = ShareRouter(0.25)
    with pytest.raises(LayoutError, match="marginal_share="):
        router.marginal_share = share
    assert router.marginal_share == 0.25
