"""Undo for attributes: what a block of code changed on some objects, put back exactly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any


class _Missing:
    """Stands for "was not there"; a class, so that a deep copy of a journal keeps its identity."""


class AttributeJournal:
    """Old values of instance attributes, newest change last."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute in the instance's own dictionary and remember what it was."""
        self._entries.append((target, name, vars(target).get(name, _Missing)))
        vars(target)[name] = value

    @contextlib.contextmanager
    def watch(self, targets: Iterable[Any]) -> Iterator[None]:
        """Remember every attribute of `targets` that the block changes, adds or removes, also if
        it raises.
        """
        before = [(target, dict(vars(target))) for target in targets]
        try:
            yield
        finally:
            for target, old in before:
                for name in old.keys() | vars(target).keys():
                    if vars(target).get(name, _Missing) is not old.get(name, _Missing):
                        self._entries.append((target, name, old.get(name, _Missing)))

    def undo(self) -> None:
        """Put everything back, latest change first; a second call does nothing."""
        while self._entries:
            target, name, old = self._entries.pop()
            if old is _Missing:
                vars(target).pop(name, None)
            else:
                vars(target)[name] = old

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeJournal:
        twin = AttributeJournal()
        twin._entries = [
            (copy.deepcopy(target, memo), name, copy.deepcopy(old, memo))
            for target, name, old in self._entries
        ]
        return twin
