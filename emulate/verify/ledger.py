"""Keep the data ledger: which examples each replica consumed in which step, against the reference's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from emulate.verify.verdict import MOST_STEPS, Samples

Rows = tuple[str, ...]
_SURE = 2
"""After so many steps that have the rows of several, the batch is known to grow, whatever rows come later."""
_DRAWN = 0.1
"""So many of the rows come again before all others have come, where a program draws its rows rather than goes over them."""


@dataclass(frozen=True)
class Ledger:
    """Hold the examples of one optimizer's steps.

    Attributes:
        optimizer: Whose steps these are.
        reference: Rows of each step of the reference.
        topology: Rows of each step by replica.
        hosts: The host of each replica.
        ended: Whether the topology's run came to its own end.
        is_whole: Whether the reference came to its own end.
        by: The inputs that identify the examples, if others are computed and rounded differently; else none.
    """

    optimizer: str
    reference: tuple[Rows, ...]
    topology: tuple[Mapping[int, Rows], ...]
    hosts: Mapping[int, int]
    ended: bool = False
    by: tuple[int, ...] = ()
    is_whole: bool = False

    @property
    def is_known(self) -> bool:
        """Return whether the examples of at least one step were seen in both runs."""
        return bool(self.reference) and bool(self.topology)

    @cached_property
    def growth(self) -> int:
        """Return how many times larger the batch is: n if every step has the reference's next n steps, else 1.

        It is the number of replicas (`PER_REPLICA * num_replicas_in_sync`) or that of hosts (`PER_WORKER * num_workers`). The
        last step of an epoch has what is left, of fewer.
        """
        return max((len(steps) for steps in self._grown), default=1)

    @cached_property
    def _grown(self) -> tuple[range, ...]:
        """Return which steps of the reference make up each step; none if no batch grows.

        Between two of them are steps whose rows the last of an epoch would have, where a remainder is dropped.
        """
        if not self.is_known or not self.reference[0]:
            return ()
        n = _together(self.topology[0]).total() // len(self.reference[0])
        grown: list[range] = []
        for rows in map(_together, self.topology if 1 < n <= len(self.hosts) else ()):
            at = grown[-1].stop if grown else 0
            ways = [range(at, at + k) for k in range(n, 0, -1)] + [range(at + k, at + k + n) for k in range(1, n if at else 1)]
            recorded = (way for way in ways if way.stop <= len(self.reference))
            steps = next((way for way in recorded if self._joined(way.start, len(way)) == rows), None)
            if steps is None:
                # Of the last one the reference may have recorded a part.
                is_cut = len(self.reference) - at < n and not self._joined(at, n) - rows
                # Steps that all have the same size, without repeats, belong to other epochs.
                are_alike = len(grown) >= _SURE and len(set(map(_size, self.topology))) == 1 and not self.repeated_in_step
                return tuple(grown) if grown and (is_cut or are_alike) else ()
            grown.append(steps)
            if steps.stop >= len(self.reference):
                break
        return tuple(grown)

    @property
    def others_from(self) -> int | None:
        """Return the step from which on a growing batch has other examples than one device, or None.

        An epoch that has so many steps whatever the batch has more rows where that is larger, and what is shuffled anew begins
        later.
        """
        step = len(self._grown)
        recorded = self._grown[-1].stop + self.growth if self._grown else 0
        return step if self._grown and step < len(self.topology) and recorded <= len(self.reference) else None

    @property
    def dropped(self) -> int:
        """Return how many examples a growing batch leaves out, because the end of an epoch does not fill one."""
        gaps = [range(before.stop, after.start) for before, after in itertools.pairwise(self._grown)]
        return sum(len(self.reference[k]) for gap in gaps for k in gap)

    @property
    def grows(self) -> bool:
        """Return whether the batch grows with the replicas or the hosts."""
        return self.growth > 1

    @property
    def rows_in_all(self) -> tuple[int, int]:
        """Return how many examples all recorded steps took, in the topology and in the reference."""
        return sum(map(_size, self.topology)), sum(map(len, self.reference))

    def _joined(self, at: int, count: int) -> Counter[str]:
        return Counter(row for rows in self.reference[at : at + count] for row in rows)

    @cached_property
    def times_as_large(self) -> int:
        """Return how many times larger the batch is if the order differs, too: the number of hosts or replicas, else 1."""
        if not self.is_known or self.grows or self.repeated_in_step:
            return 1
        ours, theirs = max(map(_size, self.topology)), max(map(len, self.reference))
        full = sum(_size(step) == ours for step in self.topology)
        times, rest = divmod(ours, theirs or 1)
        factors = {len(self.hosts), len(set(self.hosts.values()))} - {1}
        is_steady = 2 * full > len(self.topology) and sum(len(rows) == theirs for rows in self.reference) * 2 > len(
            self.reference
        )
        return times if not rest and times in factors and is_steady and self._goes_round else 1

    @cached_property
    def times_as_small(self) -> int:
        """Return how many steps share one reference step's examples, up to its first smaller step; 1 if they do not."""
        if not self.is_known or self.grows:
            return 1
        ours, theirs = max(map(_size, self.topology)), len(self.reference[0])
        times, rest = divmod(theirs, ours or 1)
        if rest or times < 2:
            return 1
        full = itertools.takewhile(lambda rows: len(rows) == theirs, self.reference[: len(self.topology) // times])
        pairs = [(self.topology[k * times : (k + 1) * times], Counter(rows)) for k, rows in enumerate(full)]
        agrees = all(sum(map(_together, steps), Counter()) == rows for steps, rows in pairs)
        return times if pairs and agrees else 1

    @cached_property
    def _goes_round(self) -> bool:
        """Return whether no example repeats before all others came once, except for those that fill no step."""
        everything = set(itertools.chain(*self.reference, *(_together(step) for step in self.topology)))
        seen: set[str] = set()
        for step in map(_together, self.topology):
            if step.keys() & seen:
                return len(everything) - len(seen) < step.total()
            seen |= step.keys()
        return True

    @property
    def num_steps(self) -> int:
        """Return how many steps of the topology the reference's recorded steps cover."""
        return len(self._grown) or min(len(self.reference), len(self.topology))

    @cached_property
    def expected(self) -> tuple[Rows, ...]:
        """Return the reference's examples of each step of the topology."""
        steps = self._grown or [range(k, k + 1) for k in range(self.num_steps)]
        return tuple(tuple(row for k in span for row in self.reference[k]) for span in steps)

    @cached_property
    def is_same(self) -> bool:
        """Return whether every step has the reference's examples, each as often."""
        return self.is_known and not self.grows and self.first_apart is None

    @cached_property
    def first_apart(self) -> int | None:
        """Return the first step whose examples differ; the one after the last of a run that ended while the other went on."""
        pairs = zip(self.topology, self.expected, strict=False)
        end = self.num_steps if (self.ends_early or self.goes_on) and not self.grows else None
        return next((k for k, (ours, theirs) in enumerate(pairs) if _together(ours) != Counter(theirs)), end)

    @property
    def ends_early(self) -> bool:
        """Return whether the topology's run came to its own end in fewer steps than the reference recorded."""
        return self.ended and len(self.topology) < len(self.reference)

    @property
    def goes_on(self) -> bool:
        """Return whether the topology's run has further examples after the reference came to its own end."""
        return self.is_whole and any(map(_size, self.topology[len(self.reference) :]))

    @property
    def counted(self) -> tuple[int, int]:
        """Return the number of steps of the topology and of the reference whose examples are counted."""
        ours = len(self.topology) if self.goes_on and not self.grows else self.num_steps
        return ours, len(self.reference) if self.ends_early else self.num_steps

    @property
    def only_ends_early(self) -> bool:
        """Return whether every step has the reference's examples, and the program ended after fewer of them."""
        return self.ends_early and self.first_apart == len(self.topology)

    @cached_property
    def left_out(self) -> dict[int, int]:
        """Return how many examples of which reference steps are left out, if only remainders are missing; else none.

        A remainder is an epoch's last, smaller batch or a part of it, or what a batch has left when it is divided by the
        replicas or the hosts.
        """
        counts: dict[int, int] = {}
        at = 0
        is_less = self.first_apart is not None and not (self.grows or self.goes_on)
        for rows in map(_together, self.topology if is_less else ()):
            while at < len(self.reference) and self._is_smaller(at) and not self._keeps(rows, at):
                counts[at] = len(self.reference[at])
                at += 1
            if at == len(self.reference):
                break
            if not self._keeps(rows, at):
                return {}
            if lost := len(self.reference[at]) - rows.total():
                counts[at] = lost
            at += 1
        rest = range(at, len(self.reference) if self.ends_early else at)
        counts |= {k: len(self.reference[k]) for k in rest}
        return counts if all(map(self._is_smaller, rest)) else {}

    def _is_smaller(self, step: int) -> bool:
        """Return whether a step of the reference has fewer examples than most others."""
        sizes = [len(rows) for rows in self.reference]
        return sizes[step] < max(sizes) and 2 * sizes.count(max(sizes)) >= len(sizes)

    def _keeps(self, rows: Counter[str], step: int) -> bool:
        """Return whether these are the examples of a step of the reference, except for a remainder."""
        theirs = Counter(self.reference[step])
        lost = theirs.total() - rows.total()
        remainders = {theirs.total() % n for n in (len(self.hosts), len(set(self.hosts.values())))}
        return rows <= theirs and (not lost or (bool(rows) and (self._is_smaller(step) or lost in remainders)))

    def sizes(self, step: int) -> tuple[int, int]:
        """Return how many examples a step has in the topology and in the reference."""
        ours = _together(self.topology[step]).total() if step < len(self.topology) else 0
        theirs = self.expected if step < len(self.expected) else self.reference
        return ours, len(theirs[step]) if step < len(theirs) else 0

    @cached_property
    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        ours = Counter(row for step in self.topology[: self.counted[0]] for rows in step.values() for row in rows)
        theirs = self.reference if self.ends_early and not self.grows else self.expected
        return ours, Counter(row for rows in theirs for row in rows)

    @property
    def samples(self) -> Samples:
        """Return the ledger in four numbers."""
        ours, theirs = self._counts
        return Samples(theirs.total(), ours.total(), (theirs - ours).total(), (ours - theirs).total() - self.foreign)

    @property
    def foreign(self) -> int:
        """Return how many examples the reference did not see in its recorded steps (another order, batch or draw)."""
        ours, theirs = self._counts
        return sum(count for row, count in ours.items() if row not in theirs)

    @property
    def fewer(self) -> int:
        """Return how many distinct examples fewer the topology saw, if it made at least as many steps as the reference."""
        ours, theirs = self._counts
        later = {
            row for step in self.topology[self.num_steps :] for row in _together(step) if row in theirs and row not in ours
        }
        return len(theirs) - len(ours) - (0 if self.grows else len(later))

    @property
    def lost(self) -> int:
        """Return how many examples fewer the topology saw: distinct ones or, where it came to its own end, in all.

        Distinct ones do not tell of equal examples, some of which are lost.
        """
        return self.fewer if self.grows or not self.ended else max(self.fewer, -self.more)

    @property
    def more(self) -> int:
        """Return how many examples more than the reference all recorded steps took."""
        ours, theirs = self.rows_in_all
        return ours - theirs

    @property
    def is_reordered(self) -> bool:
        """Return whether the same examples came in other steps."""
        ours, theirs = self._counts
        return self.first_apart is not None and ours == theirs

    @property
    def is_changed_in_place(self) -> bool:
        """Return whether foreign examples stand beside the reference's own, all of which are in their steps."""
        of_reference = set(self._counts[1])
        pairs = [(_together(ours), Counter(theirs)) for ours, theirs in zip(self.topology, self.expected, strict=False)]
        in_place = all({row for row in ours if row in of_reference} <= set(theirs) for ours, theirs in pairs)
        return in_place and self.foreign > 0 and all(ours.total() == theirs.total() for ours, theirs in pairs)

    @property
    def is_cut_within_an_epoch(self) -> bool:
        """Return whether both runs saw the same examples and end within an epoch, in which different ones were repeated."""
        ours, theirs = self._counts
        uneven = [max(counts.values(), default=0) - min(counts.values(), default=0) for counts in (ours, theirs)]
        return set(ours) == set(theirs) and ours.total() == theirs.total() and uneven == [1, 1]

    @property
    def counts_by_chance(self) -> bool:
        """Return whether how often an example comes tells nothing: the run ends within an epoch, or both runs draw as many."""
        ours, theirs = self._counts
        draw_alike = self._draws and ours.total() == theirs.total() and not self.repeated_in_step
        return self.is_cut_within_an_epoch or draw_alike

    @cached_property
    def repeated_in_step(self) -> int:
        """Return how many examples several replicas consumed in one step, more often than the reference.

        Where the reference draws rows with replacement, other ones come twice by chance.
        """
        if self._repeats_by_chance:
            return 0
        most: Counter[str] = Counter()
        for rows in self.reference:
            most |= Counter(rows)
        return sum(
            count - max(1, most[row])
            for step in self.topology
            for row, count in _together(step).items()
            if count > max(1, most[row])
        )

    @property
    def _repeats_by_chance(self) -> bool:
        """Return whether the reference's steps repeat examples, too: nearly as many, or it draws with the same start."""
        steps = list(zip(map(_together, self.topology), map(Counter, self.reference), strict=False))
        ours = sum(rows.total() - len(rows) for rows, _ in steps)
        theirs = sum(rows.total() - len(rows) for _, rows in steps)
        alike = max(len(self.identical_replicas), len(self.identical_hosts))
        if not theirs or 2 * alike > len(self.topology):
            return False
        begins_alike = steps[0][0] == steps[0][1]
        return (begins_alike and self._draws) or ours <= 2 * theirs + 3 * math.sqrt(theirs)

    @property
    def _draws(self) -> bool:
        """Return whether the reference draws its examples: many repeat before all others came once."""
        everything = set(itertools.chain(*self.reference))
        seen: set[str] = set()
        again = 0
        for rows in self.reference:
            again += len(rows) - len(set(rows))
            for row in dict.fromkeys(rows):
                if row in seen and len(everything) - len(seen) < len(rows):
                    seen = set()  # of the next epoch
                again += row in seen
                seen.add(row)
        return again > _DRAWN * sum(map(len, self.reference))

    @cached_property
    def draws_others(self) -> bool:
        """Return whether reference and run draw their examples, equally many: first the same, then others."""
        pairs = list(zip(self.topology, self.expected, strict=False))
        is_later = self.first_apart is not None and 0 < self.first_apart < len(pairs)
        return (
            is_later and self._draws and not self.repeated_in_step and all(_size(ours) == len(theirs) for ours, theirs in pairs)
        )

    @cached_property
    def shared_by_hosts(self) -> int:
        """Return how many examples several hosts took in an epoch, in place of others, in different orders.

        0 where all hosts have the same rows, or their steps take rows of the reference's step alone.
        """
        steps = list(zip(self.topology, self.expected, strict=False))
        is_apart = any(_together(ours).keys() - set(theirs) for ours, theirs in steps)
        if self.grows or self.identical_hosts or not is_apart or any(_size(ours) != len(theirs) for ours, theirs in steps):
            return 0
        return next((shared for steps in self._passes if (shared := self._shared_in(steps))), 0)

    def _shared_in(self, steps: slice) -> int:
        by_host: dict[int, Counter[str]] = {}
        for step in self.topology[steps]:
            for host, rows in self._by_host(step).items():
                by_host.setdefault(host, Counter()).update(rows)
        hosts = Counter(row for rows in by_host.values() for row in rows)
        again = sum(rows.total() - len(rows) for rows in by_host.values())
        shared = sum(count > 1 for count in hosts.values())
        return shared if shared > again else 0

    @property
    def _passes(self) -> Iterator[slice]:
        """Yield the reference's steps from each that repeats an example to the next, up to one that has an example twice."""
        start, seen = 0, set[str]()
        for k, rows in enumerate(self.reference):
            has_twice = len(set(rows)) < len(rows)
            if has_twice or not seen.isdisjoint(rows):
                yield slice(start, k)
                start, seen = k, set()
            if has_twice:
                return
            seen.update(rows)
        yield slice(start, len(self.reference))

    @cached_property
    def identical_replicas(self) -> tuple[int, ...]:
        """Return the steps in which every replica had the same examples."""
        return tuple(k for k, step in enumerate(self.topology) if _all_alike([Counter(rows) for rows in step.values()]))

    @cached_property
    def identical_hosts(self) -> tuple[int, ...]:
        """Return the steps in which every host had the same examples."""
        return tuple(k for k, step in enumerate(self.topology) if _all_alike(list(self._by_host(step).values())))

    def _by_host(self, step: Mapping[int, Rows]) -> dict[int, Counter[str]]:
        counts: dict[int, Counter[str]] = {}
        for replica, rows in step.items():
            counts.setdefault(self.hosts[replica], Counter()).update(rows)
        return counts

    @property
    def is_prefix(self) -> bool:
        """Return whether the topology has the first examples of the reference, without repeats in a step: it ended earlier."""
        once = Counter(row for step in self.topology[: self.num_steps] for row in set(_together(step)))
        flat = [row for rows in self.reference for row in rows]
        return once == Counter(flat[: once.total()])

    def counts(self, step: int) -> dict[int, int]:
        """Return how many examples each replica had in a step."""
        return {replica: len(rows) for replica, rows in self.topology[step].items()}

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return how many examples each replica had, in the order of the replicas, for the first steps."""
        replicas = sorted(self.hosts)
        steps = (self.counts(step) for step in range(min(len(self.topology), MOST_STEPS)))
        return tuple(tuple(counts.get(replica, 0) for replica in replicas) for counts in steps)

    @property
    def uneven(self) -> tuple[int, ...]:
        """Return the steps in which the replicas had different numbers of examples."""
        return tuple(k for k in range(len(self.topology)) if len(set(self.counts(k).values())) > 1)


def _size(step: Mapping[int, Rows]) -> int:
    return sum(map(len, step.values()))


def _together(step: Mapping[int, Rows]) -> Counter[str]:
    return Counter(row for rows in step.values() for row in rows)


def _all_alike(counts: Sequence[Counter[str]]) -> bool:
    return len(counts) > 1 and bool(counts[0]) and all(count == counts[0] for count in counts[1:])
