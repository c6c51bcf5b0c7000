"""A cache's share where a calibration puts it, and where the machine's times move it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from simulated_machine import WINDOW, Chat, Machine, install, install_with_attention

from sparsekv.attention.timings import Recent
from sparsekv.engine.balance import Balance, placed_share
from sparsekv.roofline import CostModel

COST = CostModel(
    cpu_s_per_token=2e-6, h2d_s_per_token=3e-6, cpu_overhead_s=2e-4, gpu_overhead_s=1e-4
)
"""p = 0.6, and r(L) is 20 tokens less than p L."""
CLIPPED = replace(COST, cpu_overhead_s=1e-3)
"""r(L) is 180 tokens less than p L: 0 up to 300 tokens."""
DEEP = 48
"""Layers of a model that is not small."""


@pytest.fixture
def machine(monkeypatch):
    return install(Machine(COST), monkeypatch)


@pytest.fixture
def attending(monkeypatch):
    """Where layers attend, too."""
    return install_with_attention(Machine(COST), monkeypatch)


def changed(cost, cpu=1.0, h2d=1.0):
    return replace(
        cost,
        cpu_s_per_token=cost.cpu_s_per_token * cpu,
        h2d_s_per_token=cost.h2d_s_per_token * h2d,
    )


def assert_within_half_a_segment(chat, num_tokens):
    """`num_tokens` of a sequence should be unpinned."""
    assert abs(chat.num_unpinned - num_tokens) <= WINDOW / 2 + 1e-6


def costs_of(cost):
    return cost.cpu_s_per_token, cost.h2d_s_per_token


def optimum(cost, num_tokens):
    return cost.optimal_share(num_tokens) * num_tokens


# Where segments go


@pytest.mark.parametrize("cost", [COST, CLIPPED, changed(COST, h2d=9)])
@pytest.mark.parametrize("num_tokens", [WINDOW, 40, 161, 330])
def test_a_prompt_is_placed_at_the_best_share_of_its_length(machine, cost, num_tokens):
    chat = Chat(cost, batch_size=1)
    chat.read(num_tokens)
    placed = num_tokens // WINDOW * WINDOW
    expected = math.floor(optimum(cost, placed) / WINDOW + 0.5 + 1e-9) * WINDOW
    assert chat.num_unpinned == expected


@pytest.mark.parametrize("chunk", [None, 1, 7, WINDOW, 50])
def test_the_running_share_is_the_best_one_at_every_later_length(machine, chunk):
    chat = Chat(COST)
    chat.read(100, chunk=chunk)
    for _ in range(12):
        chat.decode(WINDOW)
        assert_within_half_a_segment(chat, optimum(COST, chat.cache.num_placed_tokens))
    assert chat.balance.cost is COST
    assert chat.cache.router.marginal_share == COST.marginal_share


def test_from_a_share_that_was_clipped_it_nears_p_as_the_law_says(machine):
    chat, machine.cost = Chat(CLIPPED), CLIPPED
    chat.read(160)
    assert chat.num_unpinned == 0
    for _ in range(12):
        chat.decode(WINDOW)
        num_tokens = chat.cache.num_placed_tokens
        share = CLIPPED.running_share(num_tokens, initial_share=0, initial_tokens=160)
        assert_within_half_a_segment(chat, share * num_tokens)


@pytest.mark.parametrize("num_first", [1, 5, WINDOW - 1])
def test_a_prompt_shorter_than_a_window_begins_with_its_first_window(machine, num_first):
    chat = Chat(CLIPPED)
    chat.read(num_first)
    assert chat.cache.stats().balance.target_share == 0
    chat.decode(WINDOW - num_first)
    assert (chat.cache.num_placed_tokens, chat.num_unpinned) == (WINDOW, 0)
    chat.decode(WINDOW)
    assert chat.cache.router.marginal_share == CLIPPED.marginal_share


@pytest.mark.parametrize("num_steps", [0, 1, 40])
def test_later_turns_of_a_chat_go_on_at_p(machine, num_steps):
    """Also where the first turn was read without a step after it."""
    chat = Chat(CLIPPED)
    chat.read(10 * WINDOW)
    chat.decode(num_steps)
    for num_tokens in (100, 40):
        chat.read(num_tokens)
        placed = chat.cache.num_placed_tokens
        share = CLIPPED.running_share(placed, initial_share=0, initial_tokens=10 * WINDOW)
        assert_within_half_a_segment(chat, share * placed)


def test_costs_that_are_given_up_leave_the_routers_error_law(machine):
    """After each segment the number unpinned is the sum of the shares in force, within a half."""
    chat, expected, rng = Chat(COST), 0.0, random.Random(0)
    chat.read(WINDOW)
    expected = COST.optimal_share(WINDOW)
    for _ in range(16):
        machine.cost = changed(COST, 2 ** rng.uniform(-2, 2), 2 ** rng.uniform(-2, 2))
        for _ in range(2):
            chat.decode(WINDOW - 1)
            expected += chat.cache.router.marginal_share
            chat.decode(1)
            assert_within_half_a_segment(chat, expected * WINDOW)
            assert abs(chat.cache.router.error) <= 0.5 + 1e-6


# What moves it


def decode_windows(chat, num_windows):
    chat.decode(num_windows * chat.cache.spec.window_size)


@pytest.mark.parametrize(("cpu", "h2d"), [(2, 1), (1, 2), (0.5, 1), (1, 0.4), (2, 3)])
@pytest.mark.parametrize("num_before", [0, 5, 31])
def test_a_step_change_is_followed_within_two_windows(machine, cpu, h2d, num_before):
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, batch_size=1)
    chat.read(330)
    chat.decode(num_before)
    machine.cost = changed(COST, cpu, h2d)
    decode_windows(chat, 2)
    assert chat.cache.router.marginal_share == pytest.approx(machine.cost.marginal_share)
    found = chat.balance.cost
    assert found.cpu_s_per_token == pytest.approx(machine.cost.cpu_s_per_token)
    assert found.h2d_s_per_token == pytest.approx(machine.cost.h2d_s_per_token)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_step_change_is_followed_where_layers_attend(attending, elastic):
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, batch_size=1, elastic=elastic)
    chat.read(330)
    attending.cost = changed(COST, 0.5, 2)
    decode_windows(chat, 2)
    assert chat.balance.cost.cpu_s_per_token == pytest.approx(attending.cost.cpu_s_per_token)
    assert chat.balance.cost.h2d_s_per_token == pytest.approx(attending.cost.h2d_s_per_token)


def spikes(rng):
    """Noise of 5 %, and every eighth time is anything that a clock may say."""
    strange = itertools.cycle([3e-1, 0.0, -1.0, math.nan, math.inf, 1e-9])

    def clock(seconds):
        noisy = seconds * rng.uniform(0.95, 1.05)
        return next(strange) if rng.random() < 0.125 else noisy

    return clock


@pytest.mark.parametrize("elastic", [False, True])
def test_nothing_moves_on_spikes_and_jumps(machine, elastic):
    machine.clock = spikes(random.Random(1))
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, elastic=elastic, num_layers=12)
    chat.read(330)
    for _ in range(3 * 32):
        chat.decode(1)
        assert chat.balance.cost is COST
        balance = chat.cache.stats().balance
        for seconds in (balance.measured_cpu_s, balance.measured_gpu_s):
            assert seconds is None or 0 < seconds < math.inf


def test_what_was_measured_is_told(attending):
    chat = Chat(COST)
    chat.read(10 * WINDOW)
    balance = chat.cache.stats().balance
    assert (balance.measured_cpu_s, balance.measured_gpu_s) == (None, None)
    chat.decode(8)
    stats = chat.cache.stats()
    balance, share, num_tokens = stats.balance, stats.cpu_share, chat.cache.num_placed_tokens
    assert balance.target_share == COST.optimal_share(num_tokens)
    assert balance.predicted_s == COST.step_time(share, num_tokens)
    assert balance.measured_cpu_s == pytest.approx(COST.cpu_time(share, num_tokens))
    # Of two chunks that were read ahead the time is not the step's.
    ahead = 2 * chat.cache.spec.ping_pong_tokens
    expected = COST.gpu_time(share, num_tokens) - ahead * COST.h2d_s_per_token
    assert balance.measured_gpu_s == pytest.approx(expected)


def test_times_of_nothing_placed_move_nothing(machine):
    chat = Chat(COST)
    chat.read(3)
    chat.decode(5)
    machine.cost = changed(COST, 9, 9)
    chat.decode(5)
    balance = chat.cache.stats().balance
    assert chat.balance.cost is COST
    assert balance.measured_cpu_s is None


# The elastic share


@pytest.mark.parametrize("share", [0, 0.1, 0.2, 0.5, 0.75, 1])
def test_elastic_segments_leave_room_below_the_best_share(machine, share):
    cost = CostModel(cpu_s_per_token=(1 - share) * 1e-6, h2d_s_per_token=share * 1e-6)
    chat, machine.cost = Chat(cost, elastic=True), cost
    chat.read(20 * WINDOW)
    assert chat.cache.router.marginal_share == pytest.approx(share / (2 - share))
    assert_within_half_a_segment(chat, placed_share(share, True) * 20 * WINDOW)
    chat.decode(2)
    stats = chat.cache.stats()
    assert abs(stats.cpu_share - share) * 20 <= 0.5 + 1e-6
    chat.decode(WINDOW)
    assert chat.cache.step_share == pytest.approx(share)


RIVALS = [
    *((share, cpu, h2d) for share in (0.25, 0.5, 0.6, 0.75) for cpu, h2d in ((2, 1), (1, 2))),
    (0.9, 2, 1),
    (0.75, 1, 0.5),
    (0.75, 2, 2),
]
"""(p, times A, times B)."""


@pytest.mark.parametrize(("share", "cpu", "h2d"), RIVALS)
@pytest.mark.parametrize("num_before", [3, 6])
def test_an_elastic_step_is_nearly_the_best_in_under_16_steps(machine, share, cpu, h2d, num_before):
    """After a rival takes, or leaves, half of a bandwidth; with all the times of 48 layers."""
    machine.cost = cost = CostModel(
        cpu_s_per_token=(1 - share) * 1e-6, h2d_s_per_token=share * 1e-6, gpu_overhead_s=4e-6
    )
    rng = random.Random(2)
    machine.clock = lambda seconds: seconds * rng.uniform(0.97, 1.03)
    chat = Chat(cost, num_layers=DEEP, batch_size=1, elastic=True)
    chat.read(50 * WINDOW)
    chat.decode(num_before)
    machine.cost = rival = changed(cost, cpu, h2d)
    chat.decode(15)
    num_tokens = chat.cache.num_placed_tokens
    best = rival.step_time(rival.optimal_share(num_tokens), num_tokens)
    taken = rival.step_time(chat.cache.stats().cpu_share, num_tokens)
    assert taken <= 1.1 * best


def test_a_share_that_makes_steps_longer_is_left_whatever_engines_take(machine):
    """Another cache has the engines in turn: the CPU's part takes longer, and a step waits for the
    bus all the same.
    """
    chat = Chat(COST, num_layers=24, batch_size=1, elastic=True)
    chat.read(50 * WINDOW)
    chat.decode(10)
    before = chat.cache.step_share
    machine.cost = changed(COST, cpu=1.6)
    machine.waits = lambda cpu_tokens, gpu_tokens: 3 * gpu_tokens * COST.h2d_s_per_token
    shares = []
    for _ in range(120):
        chat.decode(1)
        shares.append(chat.cache.step_share)
    assert min(shares) < before - 0.05
    assert sum(share < before - 0.02 for share in shares) <= 24
    machine.waits = lambda cpu_tokens, gpu_tokens: 0.0
    chat.decode(80)
    assert chat.cache.step_share < before - 0.05
    assert is_nearly_best(chat)


@pytest.mark.parametrize("num_layers", [3, 8, 24])
def test_elastic_costs_are_followed_with_any_number_of_layers(machine, num_layers):
    """By the end of two windows of steps at the latest."""
    chat = Chat(COST, num_layers=num_layers, batch_size=1, elastic=True, window_size=32)
    chat.read(330)
    machine.cost = changed(COST, 0.5, 2)
    decode_windows(chat, 2)
    assert chat.balance.cost.cpu_s_per_token == pytest.approx(machine.cost.cpu_s_per_token)
    assert chat.balance.cost.h2d_s_per_token == pytest.approx(machine.cost.h2d_s_per_token)


def test_a_steps_share_is_not_changed_for_next_to_nothing(machine):
    chat = Chat(COST, elastic=True)
    chat.read(40 * WINDOW)
    chat.decode(2)
    shares = set()
    for _ in range(40):
        chat.decode(1)
        shares.add(chat.cache.step_share)
        assert is_nearly_best(chat)
    assert len(shares) == 1
    machine.cost = changed(COST, cpu=1.2)
    chat.decode(40)
    assert is_nearly_best(chat)
    assert chat.cache.step_share not in shares


def is_nearly_best(chat):
    """A step at the share in use takes at most 2 % longer than at the best one."""
    cost, num_tokens = chat.balance.cost, chat.cache.num_placed_tokens
    best = cost.step_time(cost.optimal_share(num_tokens), num_tokens)
    return cost.step_time(chat.cache.step_share, num_tokens) <= 1.02 * best


@pytest.mark.parametrize(("cpu", "h2d", "share"), [(1e3, 1, 0), (1, 1e3, 1)])
@pytest.mark.parametrize("elastic", [False, True])
def test_shares_end_at_nothing_and_at_all(machine, cpu, h2d, share, elastic):
    cost = replace(changed(COST, cpu, h2d), cpu_overhead_s=0.0 if share else 1e-3)
    chat, machine.cost = Chat(cost, elastic=elastic), cost
    chat.read(4 * WINDOW)
    chat.decode(2 * WINDOW)
    stats = chat.cache.stats()
    assert stats.cpu_share == share
    assert stats.balance.target_share == pytest.approx(share, abs=1e-3)
    assert stats.balance.predicted_s >= 0


def test_a_share_of_all_that_ends_is_followed(machine):
    """While the accelerator has no part, the CPU's is judged alone."""
    cost = CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=1e-4)
    chat, machine.cost = Chat(cost, num_layers=12, elastic=True), cost
    chat.read(5 * WINDOW)
    chat.decode(4)
    assert chat.cache.stats().cpu_share == 1
    machine.cost = changed(cost, cpu=100)
    chat.decode(8)
    assert chat.balance.cost.marginal_share == pytest.approx(0.5)


# Other rows


def select_rows(chat, rows):
    chat.cache.batch_select_indices(torch.tensor(rows))
    chat.batch_size = len(rows)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]])
@pytest.mark.parametrize("num_before", [0, 25])
def test_the_costs_are_those_of_the_rows_from_the_first_step_on(machine, elastic, rows, num_before):
    """Times of the rows before move nothing."""
    chat = Chat(COST, batch_size=4, window_size=32, ping_pong_tokens=32, elastic=elastic)
    chat.read(330)
    chat.decode(num_before)
    select_rows(chat, rows)
    machine.cost = changed(COST, len(rows) / 4, len(rows) / 4)
    for num_steps in (1, 1, 32, 32):
        chat.decode(num_steps)
        assert costs_of(chat.balance.cost) == pytest.approx(costs_of(machine.cost), rel=1e-9)
        balance, share = chat.cache.stats().balance, chat.cache.stats().cpu_share
        num_tokens = chat.cache.num_placed_tokens
        assert balance.predicted_s == pytest.approx(machine.cost.step_time(share, num_tokens))
        if balance.measured_cpu_s is not None:
            assert balance.measured_cpu_s == pytest.approx(
                machine.cost.cpu_time(share, num_tokens), rel=0.1
            )
    machine.cost = changed(machine.cost, 2)
    decode_windows(chat, 2)
    assert costs_of(chat.balance.cost) == pytest.approx(costs_of(machine.cost))


def test_no_time_of_other_rows_counts(machine):
    """Neither of the window that was under way nor of the last step, which is known later."""
    chat = Chat(COST, batch_size=4, window_size=32, ping_pong_tokens=32)
    chat.read(330)
    chat.decode(31)
    select_rows(chat, [3, 1])
    timings = chat.cache.companion.timings
    for recent in (timings.cpu, timings.gpu):
        for _ in range(200):
            Recent.note(recent, 160, 1.0)  # the machine's own would tell what it is now
    machine.cost = changed(COST, 0.25, 0.5)
    chat.decode(33)
    assert costs_of(chat.balance.cost) == pytest.approx(costs_of(machine.cost))


def test_a_copy_knows_the_rows_of_its_costs(machine):
    chat = Chat(COST, batch_size=4)
    chat.read(330)
    select_rows(chat, [3, 1])
    chat.decode(1)
    twin = chat.copy()
    twin.decode(1)
    assert twin.balance.cost == chat.balance.cost == changed(COST, 0.5, 0.5)


def test_beams_that_are_reordered_are_followed(machine):
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, batch_size=2)
    chat.read(330)
    machine.cost = changed(COST, 2)
    for _ in range(64):
        chat.decode(1)
        chat.cache.reorder(torch.tensor([1, 1]))
    assert costs_of(chat.balance.cost) == pytest.approx(costs_of(machine.cost))


# Other lives


@pytest.mark.parametrize("elastic", [False, True])
def test_a_copy_has_a_router_of_its_own_and_the_same_costs(machine, elastic):
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, elastic=elastic)
    chat.read(330)
    machine.cost = changed(COST, 2)
    decode_windows(chat, 2)
    twin = chat.copy()
    assert twin.cache.router is twin.balance.router
    assert twin.cache.router is not chat.cache.router
    assert twin.balance.cost == chat.balance.cost
    assert twin.cache.router.marginal_share == chat.cache.router.marginal_share
    assert twin.cache.stats() == replace(
        chat.cache.stats(), **{n: getattr(twin.cache.stats(), n) for n in COUNTS}
    )
    before = chat.balance.cost, chat.cache.router.marginal_share, chat.cache.router.error
    machine.cost = changed(COST, 0.5)
    decode_windows(twin, 2)
    assert twin.balance.cost != before[0]
    now = chat.balance.cost, chat.cache.router.marginal_share, chat.cache.router.error
    assert now == before


COUNTS = ("h2d_bytes", "d2h_bytes", "borrowed_bytes", "buffer_bytes", "registered_bytes", "regions")
COUNTS += ("longest_registration_s",)
"""What a copy counts for itself."""


def test_a_copy_of_a_prompt_half_read_goes_on_as_the_original(machine):
    chat = Chat(CLIPPED)
    chat.store.reserve(1000, 10 * WINDOW)
    chat.forward(4 * WINDOW)
    twin = chat.copy()
    for each in (chat, twin):
        each.forward(6 * WINDOW)
        assert each.num_unpinned == 0


@pytest.mark.parametrize("elastic", [False, True])
def test_an_emptied_cache_begins_anew_with_what_is_known(machine, elastic):
    chat = Chat(COST, window_size=32, ping_pong_tokens=32, elastic=elastic)
    chat.read(330)
    machine.cost = changed(COST, 2)
    decode_windows(chat, 2)
    cost, num_before = chat.balance.cost, chat.cache.num_placed_tokens
    for empty in (chat.cache.reset, lambda: chat.store.crop(0)):
        empty()
        assert chat.cache.stats().balance.predicted_s >= 0
        chat.read(160)
        first = placed_share(cost.optimal_share(160), elastic) * 160
        assert chat.cache.num_placed_tokens == 160 < num_before
        assert abs(chat.num_unpinned - first) <= 16 + 1e-6
        chat.decode(3)
        assert chat.balance.cost == cost


@pytest.mark.parametrize("elastic", [False, True])
def test_a_cropped_cache_goes_on_at_p(machine, elastic):
    chat = Chat(COST, elastic=elastic)
    chat.read(330)
    chat.decode(40)
    chat.store.crop(7 * WINDOW + 3)
    kept = chat.num_unpinned
    chat.decode(10 * WINDOW)
    share = placed_share(COST.marginal_share, elastic)
    assert chat.cache.router.marginal_share == share
    assert abs(chat.num_unpinned - kept - 10 * WINDOW * share) <= WINDOW
    chat.decode(1)


def test_a_layer_out_of_turn_leaves_the_share_for_the_next_step(machine):
    """As where somebody attends to the last layer first: a step's share changes between steps."""
    chat = Chat(COST, elastic=True)
    chat.read(20 * WINDOW)
    chat.cache.append(0, *(torch.randn(2, 2, 1, 4) for _ in range(2)))
    before = chat.cache.step_share
    machine.cost = changed(COST, 0.2)
    chat.balance.end_step(chat.cache, machine.timings())
    assert chat.cache.step_share == before


def test_a_balance_alone_is_one_of_its_costs():
    balance = Balance(COST, is_elastic=False)
    assert balance.cost is COST
    assert balance.router.marginal_share == COST.marginal_share
    assert balance.step_share(100) is None
