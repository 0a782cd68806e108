"""Finds the longest path through a graph, in linear time and without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", int, str)


@dataclass(slots=True)
class _Step(Generic[K]):
    key: K
    followers: Iterator[K]
    longest: int = 0
    """Weight of the longest path that begins at one of the followers visited so far."""


def longest_path(
    begins: Iterable[K], followers: Callable[[K], Iterable[K]], weight: Callable[[K], int]
) -> int:
    """Returns the largest sum of weights on a path that starts at one of `begins`. A path ends
    where it would repeat a node. Visits each node once."""
    lengths: dict[K, int] = {}
    """Weight of the longest path from each node. 0 while the node is on the current path."""
    for begin in begins:
        if begin in lengths:
            continue
        lengths[begin] = 0
        path = [_Step(begin, iter(followers(begin)))]
        while path:
            step = path[-1]
            key = next(step.followers, None)
            if key is None:
                path.pop()
                length = lengths[step.key] = weight(step.key) + step.longest
                if path:
                    path[-1].longest = max(path[-1].longest, length)
            elif key in lengths:
                step.longest = max(step.longest, lengths[key])
            else:
                lengths[key] = 0
                path.append(_Step(key, iter(followers(key))))
    return max(lengths.values(), default=0)
