"""Any sequence of operations on a cache, against plain dense tensors."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from harness import Twin, assert_not_moved, build, placed_segments, regions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import row_choices, shares, specs

MAX_ROWS = 6


class CacheMachine(RuleBasedStateMachine):
    """One cache and its dense twin; placed segments are watched from step to step."""

    @initialize(spec=specs(), share=shares())
    def start(self, spec, share):
        self.folder = tempfile.TemporaryDirectory()
        self.saved = None
        self.twin = Twin(build(spec, share))
        self.placed = {}

    @property
    def cache(self):
        return self.twin.cache

    @rule(num_tokens=st.one_of(st.just(1), st.integers(0, 30)), flush=st.booleans())
    def append(self, num_tokens, flush):
        self.twin.append(num_tokens, flush=flush)

    @rule()
    def flush(self):
        for layer_idx in range(len(self.twin.dense)):
            self.cache.flush(layer_idx)

    @rule(more=st.integers(0, 40), prompt=st.integers(0, 40))
    def reserve(self, more, prompt):
        num_tokens = self.cache.num_tokens
        self.cache.reserve(num_tokens + more, num_tokens + min(prompt, more))

    @rule()
    def register_ahead(self):
        for layer_idx in range(len(self.twin.dense)):
            self.cache.register_ahead(layer_idx)

    @rule(data=st.data())
    def crop(self, data):
        self._crop_to(data.draw(st.integers(0, self.cache.num_tokens + 2)))

    @rule(data=st.data())
    def crop_a_little(self, data):
        self._crop_to(max(self.cache.num_tokens - data.draw(st.integers(1, 5)), 0))

    def _crop_to(self, num_tokens):
        self.cache.crop(num_tokens)
        self.twin.apply(lambda tensor: tensor[:, :, :num_tokens])
        self._keep_placed(num_tokens)

    @rule(data=st.data())
    def reorder(self, data):
        batch = self.cache.batch_size
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder(torch.tensor(rows))
        self.twin.apply(lambda tensor: tensor[rows])

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(row_choices(self.cache.batch_size, MAX_ROWS))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.twin.apply(lambda tensor: tensor[rows])

    @precondition(lambda self: self.cache.batch_size <= MAX_ROWS // 2)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.twin.apply(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @rule()
    def reset(self):
        self.cache.reset()
        rows = self.cache.spec.batch_size
        self.twin.apply(lambda t: t[:1, :, :0].expand(rows, -1, -1, -1))
        self.placed = {}

    @rule(share=shares())
    def change_share(self, share):
        self.cache.router.marginal_share = share

    @rule()
    def save(self):
        path = Path(self.folder.name) / "saved"
        self.cache.save(path)
        self.saved = (path, [list(layer) for layer in self.twin.dense], regions(self.cache))

    @precondition(lambda self: self.saved is not None)
    @rule(elsewhere=st.booleans())
    def load(self, elsewhere):
        path, dense, where = self.saved
        if elsewhere:
            self.twin = Twin(build(self.cache.spec, self.cache.router.marginal_share))
        self.cache.load(path)
        self.twin.dense = [list(layer) for layer in dense]
        assert regions(self.cache) == where
        self.placed = {}

    @rule()
    def go_on_with_a_copy(self):
        self.twin.cache = copy.deepcopy(self.cache)
        self.placed = {}

    def _keep_placed(self, num_tokens):
        size = self.cache.spec.segment_tokens
        self.placed = {s: v for s, v in self.placed.items() if s + size <= num_tokens}

    @invariant()
    def it_answers_as_plain_tensors_do(self):
        if hasattr(self, "twin"):
            self.twin.check()
            assert self.cache.is_complete
            assert self.cache.num_tokens == self.twin.dense[0][0].shape[2]
            assert self.cache.batch_size == self.twin.dense[0][0].shape[0]

    @invariant()
    def placed_bytes_have_not_moved(self):
        if hasattr(self, "twin"):
            now = placed_segments(self.cache)
            assert_not_moved(self.placed, now)
            self.placed = now

    @invariant()
    def the_router_is_within_half_a_segment(self):
        if hasattr(self, "twin"):
            assert abs(self.cache.router.error) <= 0.5 + 1e-6

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


class TestCache(CacheMachine.TestCase):
    settings = settings(max_examples=max(100, settings.default.max_examples))


@pytest.mark.slow
class TestCacheLonger(CacheMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=60)
