import asyncio
import gc
import sys
import threading
import time

import pytest

from forge.service import ActorFailed, ForgeActor, RemoteError
from forge.service.wire import decode_reply, encode, encode_call
from forge.service.worker import Worker


class Recorder(ForgeActor):
    def __init__(self, fail=False):
        if fail:
            raise RuntimeError("no model here")
        self.threads = {threading.get_ident()}
        self.running = 0
        self.most_at_once = 0
        self.ready = False
        self.gate = None

    async def setup(self):
        self.gate = asyncio.Event()
        self.ready = True

    def busy(self):
        self.threads.add(threading.get_ident())
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        time.sleep(0.01)
        self.running -= 1
        return self.most_at_once

    def seen_threads(self):
        return len(self.threads), threading.get_ident() == threading.main_thread().ident

    async def wait(self):
        await self.gate.wait()
        return "opened"

    async def open(self):
        self.gate.set()

    def is_ready(self):
        return self.ready

    def stop_iteration(self):
        raise StopIteration

    def leave(self):
        raise SystemExit(4)


async def started(**kwargs):
    worker = Worker(rank=0)
    decode_reply(await worker.start(encode((Recorder, kwargs))))
    return worker


async def ask(worker, method, *args, every_rank_answers=True):
    reply = await worker.handle(encode_call(method, args, {}, every_rank_answers=every_rank_answers))
    return decode_reply(reply)[1]


def test_sync_methods_run_one_at_a_time_on_the_thread_that_built_the_actor():
    async def main():
        worker = await started()
        at_once = await asyncio.gather(*(ask(worker, "busy") for _ in range(5)))
        return at_once, await ask(worker, "seen_threads")

    assert asyncio.run(main()) == ([1, 1, 1, 1, 1], (1, False))


def test_async_methods_interleave_and_do_not_wait_for_sync_ones():
    async def main():
        worker = await started()
        waiting = [asyncio.ensure_future(ask(worker, "wait")) for _ in range(300)]
        busy = asyncio.ensure_future(ask(worker, "busy"))
        await ask(worker, "open")
        return await asyncio.gather(*waiting), await busy

    opened, _ = asyncio.run(asyncio.wait_for(main(), 10))
    assert opened == ["opened"] * 300


def test_setup_runs_before_the_first_call():
    async def main():
        return await ask(await started(), "is_ready")

    assert asyncio.run(main()) is True


def test_what_init_raises_is_the_answer_to_start():
    with pytest.raises(RuntimeError, match="no model here"):
        asyncio.run(started(fail=True))


def test_a_method_that_raises_leaves_the_worker_usable():
    async def main():
        worker = await started()
        with pytest.raises(RemoteError, match="SystemExit: 4"):
            await ask(worker, "leave")
        with pytest.raises(RuntimeError, match="StopIteration"):  # as coroutines have it
            decode_reply(await worker.handle(encode_call("stop_iteration", (), {}, every_rank_answers=True)))
        return await ask(worker, "busy")

    assert asyncio.run(main()) == 1


def test_other_ranks_send_their_result_only_when_asked():
    async def main():
        worker = Worker(rank=1)
        decode_reply(await worker.start(encode((Recorder, {}))))
        return [await ask(worker, "busy", every_rank_answers=everyone) for everyone in (True, False)]

    assert asyncio.run(main()) == [1, None]


class Careless(ForgeActor):
    async def lose_a_task(self):
        async def work():
            raise LookupError("nobody awaits me")

        asyncio.ensure_future(work())  # noqa: RUF006 - that is what is tested

    async def keep_a_task(self):
        async def work():
            raise LookupError("awaited below")

        try:
            await asyncio.ensure_future(work())
        except LookupError:
            return "caught"

    def leave_a_thread(self):
        thread = threading.Thread(target=lambda: 1 / 0, name="helper")
        thread.start()
        thread.join()

    def end_a_thread(self):
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("lose_a_task", r"the task '.*' died of LookupError: nobody awaits me"),
        ("leave_a_thread", r"the thread 'helper' died of ZeroDivisionError"),
        ("keep_a_task", None),
        ("end_a_thread", None),
    ],
)
def test_the_watch_answers_when_something_died_that_nobody_waits_for(method, told):
    async def main():
        before = threading.excepthook
        worker = Worker(rank=0)
        decode_reply(await worker.start(encode((Careless, {}))))
        watch = asyncio.ensure_future(worker.watch())
        await asyncio.sleep(0)
        await ask(worker, method)
        gc.collect()
        done, _ = await asyncio.wait([watch], timeout=0.2)
        if told is None:
            assert not done
            watch.cancel()
            await asyncio.wait([watch])
        else:
            with pytest.raises(ActorFailed, match=told) as info:
                decode_reply(watch.result())
            assert "Traceback" in str(info.value.__cause__)
        assert threading.excepthook is before

    asyncio.run(main())
