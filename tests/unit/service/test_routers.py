from dataclasses import dataclass

from forge.service import LeastLoaded, RoundRobin


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
