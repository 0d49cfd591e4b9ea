"""Expand Slurm's compressed lists: nodes (`n[01-03,7]-ib,m5`) and tasks per node (`4(x2),3`).

TensorFlow's resolver (2.21) reads names that end with their brackets alone, and zips nodes and counts of different length.
"""

from __future__ import annotations

import itertools
import re

_NODE = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def nodes_of(text: str) -> list[str]:
    """Return the node names in a compressed list, in order.

    Args:
        text: A list such as `n[01-02]`, `r[1-2]n[1-2]` or `a[1,3-4].cluster,b`.

    Returns:
        The node names.

    Raises:
        ValueError: If the text is not a list of nodes.

    Example:
        >>> nodes_of("n[09-10]-ib,m")
        ['n09-ib', 'n10-ib', 'm']
    """
    names = _NODE.findall(text)
    if not names or ",".join(names) != text:
        raise ValueError(f"{text!r} is not a list of nodes")
    return [node for name in names for node in _expanded(name)]


def _expanded(name: str) -> list[str]:
    # Every second part is what stood in brackets; the last ones run fastest.
    parts = [_numbers(part) if place % 2 else [part] for place, part in enumerate(_BRACKETS.split(name))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _numbers(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def counts_of(text: str) -> list[int]:
    """Return the number of tasks on each node.

    Args:
        text: A list such as `4(x2),3`.

    Returns:
        One number for each node.

    Raises:
        ValueError: If the text is not a list of task counts.

    Example:
        >>> counts_of("4(x2),3")
        [4, 4, 3]
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"{text!r} is not a list of tasks per node")
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
