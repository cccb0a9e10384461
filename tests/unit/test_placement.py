"""Which machine and which GPUs a service gets, with numbers worked by hand."""

import pytest

from forge.placement import InsufficientResources, Machine, Request, place, threads_on


def machine(name, gpus=0, cores=64):
    return Machine(name=name, cores=cores, gpus=tuple(str(i) for i in range(gpus)))


def gpu(service, procs=1, num_replicas=1, hosts=1):
    return Request(service=service, procs=procs, num_replicas=num_replicas, hosts=hosts, with_gpus=True)


def where(placement, service, replica=0):
    return [(slot.machine, slot.gpus) for slot in placement[service, replica]]


def test_the_trainers_ranks_are_next_to_each_other_and_the_generators_fill_the_other_host():
    placed = place(
        [gpu("generator", procs=2, num_replicas=4), gpu("trainer", procs=8)], [machine("a", 8), machine("b", 8)]
    )
    assert where(placed, "trainer") == [(0, list("01234567"))]
    assert [where(placed, "generator", i) for i in range(4)] == [
        [(1, ["0", "1"])], [(1, ["2", "3"])], [(1, ["4", "5"])], [(1, ["6", "7"])]
    ]  # fmt: skip


def test_a_trainer_that_spans_two_hosts_takes_its_processes_on_each():
    placed = place([gpu("generator", procs=4), gpu("trainer", procs=4, hosts=2)], [machine("a", 8), machine("b", 4)])
    assert where(placed, "trainer") == [(0, list("0123")), (1, list("0123"))]
    assert where(placed, "generator") == [(0, list("4567"))]


def test_a_small_replica_leaves_whole_hosts_free_for_large_ones():
    placed = place([gpu("ref_model"), gpu("trainer", procs=8)], [machine("a", 8), machine("b", 2)])
    assert where(placed, "trainer") == [(0, list("01234567"))]
    assert where(placed, "ref_model") == [(1, ["0"])]


def test_services_on_the_cpu_are_spread_over_the_hosts_by_what_they_compute():
    light = Request(service="reward", heavy=False)
    placed = place([Request(service="trainer"), Request(service="generator"), light], [machine("a", cores=8)] * 2)
    assert where(placed, "trainer") == [(0, [])]
    assert where(placed, "generator") == [(1, [])]
    assert where(placed, "reward") == [(0, [])]


def test_a_host_with_more_cores_gets_more_processes():
    placed = place([Request(service="generator", num_replicas=4)], [machine("a", cores=4), machine("b", cores=12)])
    assert sorted(where(placed, "generator", i)[0][0] for i in range(4)) == [0, 1, 1, 1]


def test_enough_gpus_in_all_but_not_on_one_host_is_told_with_what_is_free():
    with pytest.raises(InsufficientResources) as info:
        place([gpu("trainer", procs=4), gpu("generator", procs=4)], [machine("a", 6), machine("b", 2)])
    message = str(info.value)
    assert "generator (replica 0) needs 4 GPUs on one host" in message
    assert "a 2 of 6, b 2 of 2" in message
    assert "services.generator.procs" in message


def test_more_hosts_than_there_are_is_told_with_their_names():
    with pytest.raises(InsufficientResources, match=r"services.trainer.hosts is 3, and there are 2 \(a, b\)"):
        place([Request(service="trainer", hosts=3)], [machine("a"), machine("b")])


def test_the_sum_over_hosts_counts_every_one_of_them():
    with pytest.raises(InsufficientResources, match="16 GPUs needed, 12 available") as info:
        place([gpu("trainer", procs=8, hosts=2)], [machine("a", 8), machine("b", 4)])
    assert "16 = 1 replica × 2 hosts × 8 processes" in str(info.value)


def test_a_service_shares_the_cores_of_its_own_host_only():
    machines = [machine("a", cores=8), machine("b", cores=4)]
    requests = [Request(service="trainer"), Request(service="generator", num_replicas=2)]
    placed = place(requests, machines)
    assert [[slot.machine for slot in placed[key]] for key in placed] == [[0], [0], [1]]
    assert threads_on(placed, requests, machines) == [{"trainer": 4, "generator": 4}, {"generator": 4}]


def sharing(procs=1, num_replicas=1, with_gpus=True):
    return Request(
        service="generator", procs=procs, num_replicas=num_replicas, with_gpus=with_gpus, turns_with="trainer"
    )


def test_a_generator_that_takes_turns_gets_the_trainers_gpus_and_asks_for_none_of_its_own():
    placed = place([sharing(), gpu("trainer")], [machine("a", 1)])
    assert where(placed, "trainer") == where(placed, "generator") == [(0, ["0"])]
    placed = place([sharing(procs=2, num_replicas=2), gpu("trainer", procs=5)], [machine("a", 8)])
    assert [where(placed, "generator", i) for i in range(2)] == [[(0, ["0", "1"])], [(0, ["2", "3"])]]


def test_replicas_that_the_trainers_gpus_cannot_hold_are_refused():
    with pytest.raises(InsufficientResources, match=r"share the GPUs of trainer, 3, and needs 4 GPUs: 2 replicas × 2"):
        place([sharing(procs=2, num_replicas=2), gpu("trainer", procs=3)], [machine("a", 8)])


def test_services_that_take_turns_have_all_cores_in_theirs():
    requests = [Request(service="trainer"), sharing(num_replicas=2, with_gpus=False), Request(service="ref_model")]
    shares = threads_on(place(requests, [machine("a", cores=12)]), requests, [machine("a", cores=12)])
    # 12 cores among trainer and reference, among generators and reference; the reference counts on all four.
    assert shares == [{"trainer": 6, "generator": 4, "ref_model": 3}]
    alone = [Request(service="trainer"), sharing(with_gpus=False), Request(service="reward", heavy=False)]
    shares = threads_on(place(alone, [machine("a", cores=2)]), alone, [machine("a", cores=2)])
    assert shares == [{"trainer": 2, "generator": 2, "reward": 1}]
