from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from forge.service import LeastLoaded, RoundRobin
from forge.service.routers import LoadOrder


@dataclass
class Stub:
    index: int
    in_flight: int = 0


def picks(router, replicas, n):
    return [router.pick(replicas).index for _ in range(n)]


def test_round_robin_takes_each_in_turn():
    assert picks(RoundRobin(), [Stub(0), Stub(1), Stub(2)], 5) == [0, 1, 2, 0, 1]


def test_round_robin_goes_on_where_it_was_when_a_replica_is_lost():
    router = RoundRobin()
    assert picks(router, [Stub(0), Stub(1), Stub(2)], 1) == [0]
    assert picks(router, [Stub(0), Stub(2)], 3) == [2, 0, 2]


def test_least_loaded_picks_the_fewest_requests_in_flight():
    assert LeastLoaded().pick([Stub(0, 3), Stub(1, 1), Stub(2, 2)]).index == 1


def test_least_loaded_spreads_equal_loads():
    assert picks(LeastLoaded(), [Stub(0), Stub(1), Stub(2)], 4) == [0, 1, 2, 0]


def test_least_loaded_takes_turns_among_the_least_loaded_only():
    assert picks(LeastLoaded(), [Stub(0, 1), Stub(1, 5), Stub(2, 1)], 4) == [0, 2, 0, 2]


class Load:
    """As much of a replica as `LoadOrder` looks at."""

    def __init__(self, index, in_flight=0):
        self.index, self.in_flight, self.on_load = index, in_flight, None

    def change(self, by):
        before, self.in_flight = self.in_flight, self.in_flight + by
        self.on_load(self, before)


def test_the_order_by_load_picks_the_least_loaded_and_equals_in_turn():
    order = LoadOrder(replicas := [Load(0), Load(1), Load(2)])
    picked = []
    for _ in range(4):
        picked.append(order.first().index)
        order.first().change(1)
    assert picked == [0, 1, 2, 0]
    replicas[2].change(-1)
    assert order.first().index == 2
    replicas[2].change(1)
    replicas[0].change(-2)
    assert order.first().index == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_the_order_by_load_always_finds_a_least_loaded_replica(changes):
    order = LoadOrder(replicas := [Load(i, in_flight=i % 2) for i in range(5)])
    for index, up in changes:
        replicas[index].change(1 if up or not replicas[index].in_flight else -1)
        assert order.first().in_flight == min(r.in_flight for r in replicas)
