"""Workers have what a coordinator schedules in turn."""

from __future__ import annotations

from emulate.instrument.coordinator import WorkerTurns
from emulate.recorder.coordinated import Coordinated


def test_workers_have_their_turns_in_order() -> None:
    turns = WorkerTurns(3)
    given = []
    for _ in range(7):
        given.append(next(worker for worker in range(3) if turns.is_of(worker)))
        turns.taken()
    assert given == [0, 1, 2, 0, 1, 2, 0]


def test_a_lost_worker_misses_its_turns_until_it_asks_again() -> None:
    turns = WorkerTurns(3)
    turns.lost.add(0)
    assert not turns.is_of(2)
    assert turns.is_of(1)
    turns.taken()
    turns.taken()
    assert turns.is_of(0)


def test_an_update_is_left_to_chance_while_something_scheduled_is_not_waited_for() -> None:
    class Graph:
        """One that is traced."""

    told: list[str] = []
    coordinated, graph = Coordinated(lambda: told.append("asynchronous")), Graph()
    coordinated._updating.add(graph)
    first = coordinated.scheduled(graph)
    coordinated.waited_for(first)
    coordinated.waited_for(coordinated.scheduled(Graph()))
    coordinated.scheduled(graph)
    assert told == []
    coordinated.scheduled(graph)
    coordinated.scheduled(graph)
    assert told == ["asynchronous"]
