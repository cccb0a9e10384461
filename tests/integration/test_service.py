"""Actors and services in real processes, through Monarch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from forge.config import RestartsConfig
from forge.placement import InsufficientResources, Request
from forge.provisioner import Provisioner
from forge.service import ForgeActor, NoHealthyReplica, RemoteError, RemoteTraceback, ReplicaDied
from tests.processes import gone, listening

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a child cannot import this file by its name

NEVER = RestartsConfig(max=0)
VARIABLES = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS MKL_NUM_THREADS CUDA_VISIBLE_DEVICES"


class Refused(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class Probe(ForgeActor):
    def __init__(self, factor=1, fail_on_rank=None, ended=None):
        self.factor = factor
        self.ended = ended
        self.thread = threading.get_ident()
        if fail_on_rank == int(os.environ["RANK"]):
            raise Refused(7, "this rank")

    def times(self, x):
        return x * self.factor

    async def echo(self, value):
        return value

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    def block(self, seconds):
        time.sleep(seconds)

    def raise_refused(self):
        raise Refused(3, "as asked")

    def raise_system_exit(self):
        sys.exit(3)

    def environment(self):
        return {name: os.environ[name] for name in VARIABLES.split()}

    def variable(self, name):
        return os.environ.get(name)

    def pid(self):
        return os.getpid()

    def same_thread(self):
        return threading.get_ident() == self.thread

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self):
        import ctypes

        ctypes.string_at(0)

    def write(self):
        print("printed by the actor")
        print("to stderr", file=sys.stderr)

    def sockets(self):
        import psutil

        return [c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]

    def sum_over_ranks(self):
        import torch  # here, so that only the actors of this test import it
        import torch.distributed as dist

        from forge.service.distributed import init_process_group

        init_process_group("gloo", timeout_s=60)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    async def shutdown(self):
        if self.ended:
            Path(self.ended).touch()


def run(scenario, **provisioner_args):
    """Runs `scenario(provisioner)` and checks that no process is left when the provisioner has shut down."""

    async def main():
        async with Provisioner(**{"gpus": [], **provisioner_args}) as provisioner:
            return await scenario(provisioner)

    result = asyncio.run(main())
    assert [p for p in psutil.Process().children(recursive=True) if "_bootstrap" in " ".join(p.cmdline())] == []
    return result


def test_a_service_routes_fans_out_and_keeps_sessions():
    async def scenario(_):
        service = await Probe.options(num_replicas=2).as_service(factor=3)
        pids = await service.pid.fanout()
        async with service.session():
            in_session = {await service.pid.route() for _ in range(4)}
        return await service.times.route(7), pids, in_session, {await service.pid.route() for _ in range(4)}

    product, pids, in_session, outside = run(scenario)
    assert product == 21
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert len(in_session) == 1
    assert outside == set(pids)


def test_an_actor_on_two_processes_knows_its_ranks_threads_and_rendezvous():
    async def scenario(provisioner):
        provisioner.plan([Request(service="probe", procs=2)])
        actor = await Probe.options(procs=2, env={"EXTRA": "yes"}).as_actor()
        return await actor.environment.call_all(), await actor.times.call(5), await actor.variable.call("EXTRA")

    ranks, product, extra = run(scenario, cores=8)
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in ranks] == [("0", "0", "2"), ("1", "1", "2")]
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks} == {("127.0.0.1", ranks[0]["MASTER_PORT"])}
    assert [(r["OMP_NUM_THREADS"], r["MKL_NUM_THREADS"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks] == [
        ("4", "4", "")
    ] * 2
    assert product == 5
    assert extra == "yes"


def test_each_process_of_a_gpu_service_sees_a_gpu_of_its_own_until_it_is_stopped():
    async def scenario(_):
        async def devices(name):
            actor = await Probe.options(procs=2, with_gpus=True, name=name).as_actor()
            seen = [r["CUDA_VISIBLE_DEVICES"] for r in await actor.environment.call_all()]
            return actor, seen

        first, seen = await devices("first")
        with pytest.raises(InsufficientResources, match=r"2 GPUs needed, 1 available.\n  second  2 = 1 replica × 2"):
            await devices("second")
        await first.shutdown()
        return seen, (await devices("third"))[1]

    seen, again = run(scenario, gpus=["4", "5", "6"])
    assert seen == ["4", "5"]
    assert len(set(again)) == 2


def test_an_exception_keeps_its_type_and_traceback_and_does_not_condemn_the_replica():
    async def scenario(_):
        service = await Probe.options().as_service()
        with pytest.raises(Refused) as info:
            await service.raise_refused.route()
        with pytest.raises(RemoteError, match="SystemExit: 3"):
            await service.raise_system_exit.route()
        return info.value, await service.times.route(2), service.describe()

    error, product, described = run(scenario)
    assert (error.code, error.detail) == (3, "as asked")
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in raise_refused" in str(error.__cause__)
    assert product == 2
    assert described == [{"replica": 0, "state": "healthy", "in_flight": 0}]


def test_an_error_on_one_rank_during_the_start_is_raised_and_leaves_no_process():
    async def scenario(_):
        with pytest.raises(Refused, match="this rank"):
            await Probe.options(procs=2, num_replicas=2).as_service(fail_on_rank=1)
        return [p for p in psutil.Process().children(recursive=True) if "_bootstrap" in " ".join(p.cmdline())]

    assert run(scenario) == []


def test_hundreds_of_calls_in_flight_do_not_wait_for_each_other_or_for_a_busy_thread():
    async def scenario(_):
        service = await Probe.options().as_service()
        busy = asyncio.ensure_future(service.block.route(1.0))
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        results = await asyncio.gather(*(service.sleep.route(0.3) for _ in range(400)))
        seconds = time.perf_counter() - started
        during = busy.done()
        await busy
        return results, seconds, during, await service.same_thread.route()

    results, seconds, _, same_thread = run(scenario)
    assert results == [0.3] * 400
    assert seconds < 30  # one after the other they would take 120
    assert same_thread


def test_a_call_costs_less_than_two_milliseconds_of_cpu():
    async def scenario(_):
        actor = await Probe.as_actor()
        tokens = list(range(256))
        await actor.echo.call(tokens)
        before = time.process_time()
        for _ in range(100):
            await actor.echo.call(tokens)
        return (time.process_time() - before) / 100

    assert run(scenario) < 0.002


def test_tensors_cost_a_copy_not_seconds():
    import torch

    async def scenario(_):
        actor = await Probe.as_actor()
        tensor = torch.randn(4_000_000)  # 16 MB; Monarch's own way takes seconds
        await actor.echo.call(tensor[:1])
        before = time.process_time()
        echoed = await actor.echo.call(tensor)
        return torch.equal(echoed, tensor), time.process_time() - before

    equal, seconds = run(scenario)
    assert equal
    assert seconds < 0.5


def test_a_killed_process_fails_what_it_owed_at_once_and_the_others_go_on(tmp_path):
    async def scenario(_):
        service = await Probe.options(num_replicas=2, name="generator", restarts=NEVER).as_service()
        pids = await service.pid.fanout()
        owed = [asyncio.ensure_future(service.sleep.route(60)) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(pids[0], signal.SIGKILL)
        started = time.perf_counter()
        done, _ = await asyncio.wait(owed, timeout=3)
        seconds = time.perf_counter() - started
        errors = [call.exception() for call in done]
        others = [await service.pid.route() for _ in range(4)]
        for call in owed:
            call.cancel()
        return errors, seconds, {*others} == {pids[1]}, [r["state"] for r in service.describe()]

    errors, _, others_answer, states = run(scenario, log_dir=tmp_path)
    assert [type(e) for e in errors] == [ReplicaDied, ReplicaDied]  # two of the four were with the other replica
    assert str(errors[0]).startswith("generator (replica 0): the process of rank 0 died.")
    assert others_answer
    assert states == ["dead", "healthy"]


def test_when_the_last_replica_dies_the_error_says_so_and_shutdown_still_works():
    async def scenario(_):
        service = await Probe.options(restarts=NEVER).as_service()
        with pytest.raises(ReplicaDied):
            await service.die.route()
        with pytest.raises(NoHealthyReplica, match="probe has no healthy replica: replica 0 dead"):
            await service.times.route(1)
        await service.shutdown()

    run(scenario)


def test_a_crash_in_native_code_shows_where_in_the_message(tmp_path):
    async def scenario(_):
        actor = await Probe.as_actor()
        with pytest.raises(ReplicaDied) as info:
            await actor.crash.call()
        return str(info.value)

    message = run(scenario, log_dir=tmp_path)
    assert "Fatal Python error: Segmentation fault" in message
    assert "string_at" in message


def test_output_goes_to_a_file_per_process_and_nowhere_else(tmp_path, capfd):
    async def scenario(_):
        service = await Probe.options(num_replicas=2, name="talker").as_service()
        await service.write.fanout()

    run(scenario, log_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talker-0-0.log", "talker-1-0.log"]
    assert (tmp_path / "talker-1-0.log").read_text() == "printed by the actor\nto stderr\n"
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_ranks_meet_over_loopback_only():
    async def scenario(_):
        actor = await Probe.options(procs=2).as_actor()
        return await actor.sum_over_ranks.call_all(), await actor.sockets.call_all(), listening([psutil.Process()])

    before = listening([psutil.Process()])
    sums, addresses, here = run(scenario)
    assert sums == [2.0, 2.0]
    assert {ip for of_rank in addresses for ip in of_rank} == {"127.0.0.1"}
    assert here == before


def test_a_reserved_port_is_given_to_nobody_else():
    async def scenario(_):
        actor = await Probe.options().as_actor()
        port = int((await actor.environment.call())["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        return port

    port = run(scenario)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # given back


def test_shutdown_runs_the_actors_own_and_a_hung_method_does_not_stop_it(tmp_path):
    async def scenario(_):
        actor = await Probe.as_actor(ended=str(tmp_path / "ended"))
        hung = asyncio.ensure_future(actor.block.call(600))
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        await actor.shutdown()
        with pytest.raises(ReplicaDied, match="was stopped"):
            await hung
        return time.perf_counter() - started

    assert run(scenario) < 30
    assert (tmp_path / "ended").exists()


SCRIPT = """
import asyncio, signal, sys, threading
from forge.provisioner import Provisioner
from forge.service import ForgeActor

class Sleeper(ForgeActor):
    def __init__(self):
        import os
        self.pid = os.getpid()
    def get_pid(self):
        return self.pid

async def main():
    async with Provisioner(gpus=[]):
        service = await Sleeper.options(num_replicas=2).as_service()
        print(*await service.get_pid.fanout(), flush=True)
        if sys.argv[1] == "interrupt":
            threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
        if sys.argv[1] != "end":
            await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def controller(mode, **popen_args):
    """A program of its own that starts two actors; yields it and the actors' pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        **popen_args,
    )
    try:
        assert process.stdout is not None
        yield process, [int(pid) for pid in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()


def test_actors_die_with_a_controller_that_is_killed():
    with controller("wait") as (process, pids):
        assert len(pids) == 2
        process.kill()
        assert gone(pids)


def test_ctrl_c_reaches_the_controller_alone_which_then_ends_everything():
    with controller("wait", start_new_session=True) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        stderr = process.communicate(timeout=60)[1]
        assert "KeyboardInterrupt" in stderr
        assert gone(pids)


def test_ctrl_c_is_heard_by_the_sleeping_main_thread_when_the_kernel_gives_it_to_another():
    with controller("interrupt") as (process, pids):
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
        assert gone(pids)


def test_a_quiet_program_prints_nothing_of_its_own():
    with controller("end") as (process, pids):
        out, err = process.communicate(timeout=60)
        assert (out, err, process.returncode) == ("", "", 0)
        assert gone(pids)


def test_two_programs_at_once_do_not_clash():
    with controller("wait") as (_, first), controller("wait") as (_, second):
        assert len({*first, *second}) == 4
