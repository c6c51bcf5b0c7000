"""`patch`: give a transformers model a KV cache in four regions, and take it back without a trace.

An adapter changes the model's attention; `generate` makes a cache of ours where transformers would
make its default one.
"""

from __future__ import annotations

import copy
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from sparsekv.engine.config import CacheConfig
from sparsekv.errors import CacheStateError, UnsupportedModelError
from sparsekv.models import compat
from sparsekv.models.generation import GenerateCall
from sparsekv.models.journal import AttributeJournal
from sparsekv.models.owned_cache import OwnedCache
from sparsekv.models.registry import find_adapter, output_attentions_error, unwrap
from sparsekv.models.store import CacheOwner, with_max_tokens

if TYPE_CHECKING:
    from sparsekv.format import CacheStats

_PATCHED = "_sparsekv_patched"
_REFUSED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods with a paged cache of their own, which knows nothing of regions."""


def patch(model: nn.Module, config: CacheConfig | None = None) -> Patched:
    """Let `model.generate` and `model(...)` keep keys and values in four regions.

    Args:
        model: a model of a supported class, also inside PEFT or torch.compile.
        config: sizes and share of the regions; None: `CacheConfig()`.
    Returns:
        The patch: a context manager, with `restore()`, `new_cache()` and `stats()`.
    Raises:
        UnsupportedModelError: not on the list, or spread over several accelerators. Nothing was
            touched.
        CacheStateError: the model is patched already.
        LayoutError: `config` breaks a rule of the format.
    """
    return Patched(model, CacheConfig() if config is None else config)


class Patched:
    """A model with its cache in regions, until `restore()`. Made by `patch`."""

    def __init__(self, model: nn.Module, config: CacheConfig) -> None:
        base = unwrap(model)
        adapter = find_adapter(base)
        if _PATCHED in vars(base):
            raise CacheStateError(
                f"this {type(base).__name__} is patched already; call restore() on the first patch "
                "before another"
            )
        adapter.check(base, config)
        self.model = model
        """What was given to `patch`."""
        self.config = config
        self._base = base
        self._adapter = adapter
        self._journal = AttributeJournal()
        self._is_open = True
        self._start()
        try:
            self._change_model()
        except BaseException:
            self.restore()
            raise

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._owner: CacheOwner | None = None
        self._latest: weakref.ref[OwnedCache] | None = None
        self._last_stats: CacheStats | None = None

    def _change_model(self) -> None:
        base = self._base
        self._journal.set(base, _PATCHED, self)
        self._inner_generate = vars(base).get("generate")
        self._adapter.install(base, self._journal)
        self._journal.set(base, "generate", types.MethodType(_generate, base))
        for name in _REFUSED:
            if hasattr(type(base), name):
                self._journal.set(base, name, types.MethodType(_refuse_continuous_batching, base))

    def restore(self) -> None:
        """Put every attribute back and free the regions; caches of this patch refuse from here on.
        Twice is once.
        """
        self._journal.undo()
        with self._lock:
            self._is_open = False
            owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()

    def new_cache(self, max_tokens: int | None = None) -> OwnedCache:
        """An empty cache for this model: for loops of your own, a chat over several `generate`
        calls, a shared prefix.

        Args:
            max_tokens: most tokens of a sequence; None: as in the config.
        Raises:
            CacheStateError: after `restore()`.
        """
        config = with_max_tokens(self.config, max_tokens)
        cache = self._adapter.new_cache(self._base, self._open_owner(), config)
        self._set_latest(cache)
        return cache

    def stats(self) -> CacheStats:
        """Tokens and bytes per region of the latest cache; after `generate`, as they were at its
        end.

        Raises:
            CacheStateError: no cache yet, or the latest one is gone or empty, or after `restore()`.
        """
        self._open_owner()
        with self._lock:
            cache = None if self._latest is None else self._latest()
            last = self._last_stats
        if cache is not None and (now := cache.stats()) is not None:
            return now
        if last is not None:
            return last
        raise CacheStateError(
            "no cache to report on: run model.generate, or keep a cache from new_cache() alive and "
            "run the model with it"
        )

    def __enter__(self) -> Patched:
        self._open_owner()
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "patched" if self._is_open else "restored"
        return f"{type(self).__name__}({type(self._base).__name__}, {self.config}, {state})"

    def _open_owner(self) -> CacheOwner:
        with self._lock:
            if not self._is_open:
                raise CacheStateError("this model was restored; call sparsekv.patch(model) again")
            # Not in __init__: a copied model is complete only after its patch was copied.
            if self._owner is None:
                self._owner = CacheOwner(self._base)
            return self._owner

    def _run_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = GenerateCall(self._base, args, kwargs)
        self._check_call(call)
        generate = self._inner_generate or types.MethodType(type(self._base).generate, self._base)
        cache = call.cache
        if call.wants_default_cache:
            cache = self.new_cache()
            if call.setting("is_assistant"):
                cache.activate_past_recording()
            kwargs = compat.with_cache(kwargs, cache)
        if not isinstance(cache, OwnedCache):
            return generate(*args, **kwargs)
        self._set_latest(cache)
        cache.reserve(call.max_cached_tokens, call.prompt_tokens)
        mark = cache.mark()
        try:
            return generate(*args, **kwargs)
        except BaseException:
            self._roll_back(cache, mark)
            raise
        finally:
            self._remember(cache)

    def _check_call(self, call: GenerateCall) -> None:
        if call.setting("output_attentions"):
            raise output_attentions_error("output_attentions=True")
        self._adapter.check_installed(self._base)
        if isinstance(call.cache, OwnedCache):
            call.cache.owner.check_open()
            if call.cache.owner is not self._open_owner():
                raise CacheStateError(
                    "this cache was made for another model (a copy of a model is another model); "
                    "take one from the new_cache() of this model's patch"
                )
            call.cache.check_complete()

    def _roll_back(self, cache: OwnedCache, mark: Any) -> None:
        """After an error or Ctrl-C the caller's cache is what it was before the call, where its
        layers can go back.
        """
        if self._is_open:
            cache.roll_back(mark)

    def _set_latest(self, cache: OwnedCache) -> None:
        with self._lock:
            self._latest = weakref.ref(cache)
            self._last_stats = None

    def _remember(self, cache: OwnedCache) -> None:
        stats = cache.stats() if self._is_open else None
        if stats is not None:
            with self._lock:
                if self._latest is not None and self._latest() is cache:
                    self._last_stats = stats

    def __deepcopy__(self, memo: dict[int, Any]) -> Patched:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.config = self.config
        twin._adapter = self._adapter
        twin._is_open = self._is_open
        twin._start()
        twin._base = copy.deepcopy(self._base, memo)
        twin.model = copy.deepcopy(self.model, memo)
        twin._journal = copy.deepcopy(self._journal, memo)
        twin._inner_generate = copy.deepcopy(self._inner_generate, memo)
        return twin

    def __reduce__(self) -> NoReturn:
        raise CacheStateError(
            "a patched model cannot be pickled: its cache is memory of this process; call "
            "restore() first, or save with save_pretrained or state_dict()"
        )


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` with its keys and values in sparsekv's regions; arguments and results are
    transformers' own.
    """
    patched: Patched | None = vars(self).get(_PATCHED)
    if patched is None:  # a reference to the bound method that outlived restore()
        return type(self).generate(self, *args, **kwargs)
    return patched._run_generate(args, kwargs)


def _refuse_continuous_batching(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedModelError(
        "continuous batching keeps a paged cache of its own and does not work with a patched "
        "model; call generate with a padded batch, or restore() first"
    )
