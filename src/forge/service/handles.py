"""What callers hold: `Service` (replicas behind a router) and `ActorHandle` (one actor on one or more processes)."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Generic, TypeVar

from forge.service.actor import ForgeActor, Options, endpoints_of, is_repeated
from forge.service.errors import NoHealthyReplica, ReplicaDied
from forge.service.replica import Mesh, Replica
from forge.service.routers import LeastLoaded, LoadOrder, Router
from forge.service.supervision import Starter
from forge.service.unseen import ended
from forge.service.wire import encode

logger = logging.getLogger(__name__)

# The replica that each service must use in the current session, by id(service); see Session.
_sticky: contextvars.ContextVar[dict[int, Replica]] = contextvars.ContextVar("forge.service.sticky")

H = TypeVar("H", bound="_Handle")


class _Handle:
    """Turns `handle.method` into an endpoint, and says which there are when the name is wrong."""

    def __init__(self, actor: type[ForgeActor], name: str) -> None:
        self.name = name
        self._endpoints = endpoints_of(actor).keys()
        self._actor_name = actor.__name__

    def _check(self, method: str) -> None:
        if method.startswith("_") or method not in self._endpoints:
            raise AttributeError(
                f"{self._actor_name} has no endpoint {method!r}; there are: {', '.join(sorted(self._endpoints))}."
            )

    def __reduce__(self) -> Any:
        raise TypeError(f"The handle of {self.name} belongs to the process that started it and cannot be sent away.")


class _Endpoint(Generic[H]):
    __slots__ = ("_handle", "_method")

    def __init__(self, handle: H, method: str) -> None:
        self._handle = handle
        self._method = method


class ActorEndpoint(_Endpoint["ActorHandle"]):
    """One method of an actor. Both ways run it on every rank and raise what any rank raised first."""

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """The result of rank 0."""
        return (await self._handle.replica.call(self._method, args, kwargs))[0]

    async def call_all(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The results of all ranks, by rank."""
        return await self._handle.replica.call(self._method, args, kwargs, every_rank_answers=True)


class ActorHandle(_Handle):
    """A running actor. `await handle.method.call(...)`, `await handle.shutdown()`.

    When one of its processes dies, calls raise `ReplicaDied` until the owner calls `restart`: an actor has a state, and
    only its owner knows how to bring that back.
    """

    def __init__(self, actor: type[ForgeActor], name: str, replica: Replica, *, starter: Starter | None = None) -> None:
        super().__init__(actor, name)
        self.replica = replica
        self._starter = starter

    def __getattr__(self, method: str) -> ActorEndpoint:
        self._check(method)
        return ActorEndpoint(self, method)

    async def restart(self) -> None:
        """Ends the processes of all ranks and builds the actor anew, with the arguments it was first built with.

        Waits first if it was restarted a short while ago. Calls meanwhile raise `ReplicaDied`.

        Raises:
            TooManyRestarts: it was restarted as often as `restarts.max` allows.
            What the actor's `__init__` or `setup` raised.
        """
        assert self._starter is not None
        self.replica = await self._starter.replace(self.replica)

    def health(self) -> dict[str, float]:
        """See `Service.health`."""
        restarts = self._starter.restarts.count if self._starter else 0
        return {"healthy": self.replica.healthy, "restarts": restarts, "in_flight": self.replica.in_flight}

    async def shutdown(self) -> None:
        """Runs the actor's own `shutdown` and ends its processes. Unanswered calls raise `ReplicaDied`."""
        await self.replica.stop()

    async def __aenter__(self) -> ActorHandle:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


class ServiceEndpoint(_Endpoint["Service"]):
    """One method of a service."""

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it on one healthy replica, the session's if there is one; the result of its rank 0.

        If the replica dies before it has answered, the request is sent once more, to another or to the replacement (not
        in a session). So a method that changes something may have done so twice.

        Raises:
            NoHealthyReplica: none is left, and none will come.
            ReplicaDied: two replicas died over it, or the one of the session.
            What the method raised.
        """
        service = self._handle
        sticky = _sticky.get({}).get(id(service))
        replica = sticky or await service._pick()
        try:
            return (await replica.call(self._method, args, kwargs))[0]
        except ReplicaDied:
            if sticky or not service._replaces(replica):
                raise
        service.retried += 1
        replica = await service._pick()
        return (await replica.call(self._method, args, kwargs))[0]

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs it on every healthy replica; the results of their rank 0, by replica. Raises what any of them raised.

        A replica that dies meanwhile is left out. If all do, it runs once more, on their replacements.
        """
        service = self._handle
        service._remember(self._method, args, kwargs)
        replicas = await service._healthy()
        answers = await self._ask_all(replicas, args, kwargs)
        if replicas and not answers:
            service.retried += 1
            answers = await self._ask_all(await service._healthy(), args, kwargs, last=True)
        return answers

    async def _ask_all(
        self, replicas: list[Replica], args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool = False
    ) -> list[Any]:
        """The answers of those that did not die; all must answer if nobody replaces them, one must if it is the last
        attempt."""
        calls = (replica.call(self._method, args, kwargs) for replica in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers, deaths = [], []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, ReplicaDied) and self._handle._replaces(replica):
                deaths.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result[0])
        if last and not answers:
            raise deaths[0]
        return answers


class Service(_Handle):
    """Replicas of one actor. `await service.method.route(...)` reaches one, `.fanout(...)` all.

    A replica that dies is replaced, as often as the `restarts` limits allow; a request waits while there is none.

    Args:
        starter: starts replacements; None leaves the dead where they are.
    """

    def __init__(
        self,
        actor: type[ForgeActor],
        name: str,
        replicas: list[Replica],
        router: Router,
        *,
        starter: Starter | None = None,
    ) -> None:
        super().__init__(actor, name)
        self.replicas = replicas
        self.retried = 0
        """Requests that were sent a second time."""
        self._actor = actor
        self._router = router
        self._starter = starter if starter and starter.supervised else None
        self._order: LoadOrder | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._stopping = False
        self._repeated: dict[str, _Repeated] = {}
        for replica in replicas:
            replica.on_death(self._replica_died)

    def __getattr__(self, method: str) -> ServiceEndpoint:
        self._check(method)
        return ServiceEndpoint(self, method)

    def session(self) -> Session:
        """`async with service.session():` every `route` inside, in tasks started there too, goes to one replica."""
        return Session(self)

    def describe(self) -> list[dict[str, Any]]:
        """For people: `{"replica", "state", "in_flight"}` of each replica."""
        return [{"replica": r.index, "state": r.state.value, "in_flight": r.in_flight} for r in self.replicas]

    def health(self) -> dict[str, float]:
        """For metrics: `healthy` replicas now, `restarts` and `retried` requests so far, requests `in_flight` now."""
        return {
            "healthy": sum(replica.healthy for replica in self.replicas),
            "restarts": self._starter.restarts.count if self._starter else 0,
            "in_flight": sum(replica.in_flight for replica in self.replicas),
            "retried": self.retried,
        }

    async def shutdown(self) -> None:
        """Stops every replica; see `ActorHandle.shutdown`."""
        self._stopping = True
        await ended(*self._replacing)
        self._tell_waiting()
        await _all([replica.stop() for replica in self.replicas])

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def _healthy(self) -> list[Replica]:
        """At least one; waits for a replacement that is on its way."""
        while True:
            if healthy := [replica for replica in self.replicas if replica.healthy]:
                return healthy
            if not self._replacing:
                states = ", ".join(f"replica {r.index} {r.state.value}" for r in self.replicas)
                why = f" {self._failure}" if self._failure else ""
                raise NoHealthyReplica(
                    f"{self.name} has no healthy replica: {states}.{why}", service=self.name
                ) from self._failure
            await self._changed.wait()

    async def _pick(self) -> Replica:
        if not isinstance(self._router, LeastLoaded):
            return self._router.pick(await self._healthy())
        if self._order is None or not (chosen := self._order.first()).healthy:
            self._order = LoadOrder(await self._healthy())
            chosen = self._order.first()
        return chosen

    def _replaces(self, replica: Replica) -> bool:
        """Whether `replica` has died (else the method itself raised what is being looked at) and gets a successor."""
        return self._starter is not None and not replica.healthy and not self._stopping

    def _remember(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_repeated(self._actor, method):
            self._repeated[method] = _Repeated(args, kwargs)

    def _replica_died(self, replica: Replica) -> None:
        """The one place that learns of a death. Requests in flight have failed with `ReplicaDied` by now."""
        logger.info("%s: replica %d of %d died", self.name, replica.index, len(self.replicas))
        self._order = None
        if self._starter is not None and not self._stopping:
            task = asyncio.ensure_future(self._replace(replica, self._starter))
            self._replacing.add(task)
            task.add_done_callback(self._replaced)

    async def _replace(self, dead: Replica, starter: Starter) -> None:
        """Consumes a dead replica; produces its successor; waits for the back-off and the start; ends with either it or
        a failure, which ends the run."""
        try:
            replica = await starter.replace(dead, self._bring_up_to_date)
        except Exception as error:
            self._failure = error
            starter.fail(error)
            return
        replica.on_death(self._replica_died)
        self.replicas[self.replicas.index(dead)] = replica

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._order = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Repeats what was last fanned out, until nothing newer was fanned out meanwhile."""
        done: dict[str, _Repeated] = {}
        while missing := {m: call for m, call in self._repeated.items() if done.get(m) is not call}:
            for method, call in missing.items():
                await replica.call(method, call.args, call.kwargs)
                done[method] = call


class _Repeated:
    """The last call of a method that a replacement has to hear too."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class Session:
    """A replica kept for a while, because it holds something that later requests need (a prefix cache, a game).

    It never moves: when its replica dies, requests in the session raise `ReplicaDied`, and a new session finds another.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._token: contextvars.Token[dict[int, Replica]] | None = None
        self.replica: Replica | None = None

    async def __aenter__(self) -> Session:
        self.replica = await self._service._pick()
        self._token = _sticky.set({**_sticky.get({}), id(self._service): self.replica})
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._token is not None
        _sticky.reset(self._token)


async def start_actor(options: Options, init_kwargs: dict[str, Any]) -> ActorHandle:
    """See `Options.as_actor`."""
    starter = _starter(options, init_kwargs)
    return ActorHandle(options.actor, options.name, await starter.start(0), starter=starter)


async def start_service(options: Options, init_kwargs: dict[str, Any]) -> Service:
    """See `Options.as_service`."""
    starter = _starter(options, init_kwargs)
    return Service(
        options.actor, options.name, await _start_replicas(options, starter), options.router(), starter=starter
    )


def _starter(options: Options, init_kwargs: dict[str, Any]) -> Starter:
    from forge.provisioner import Provisioner

    provisioner = Provisioner.current()
    return Starter(
        options.name,
        encode((options.actor, init_kwargs)),
        lambda index: _new_mesh(provisioner, options, index),
        limits=options.restarts or provisioner.restarts,
        on_incident=provisioner.on_incident,
        on_failure=provisioner.fail,
    )


async def _new_mesh(provisioner: Any, options: Options, index: int) -> Mesh:
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    from forge.service.mesh import MonarchMesh

    try:
        group = await provisioner.spawn(
            options.name,
            replica=index,
            procs=options.procs,
            gpus_per_proc=options.gpus_per_proc if options.with_gpus else 0,
            threads=options.threads,
            env=options.env,
        )
    except SupervisionError as error:
        raise ReplicaDied(
            f"{options.name} (replica {index}): a process died while it started. {error}",
            service=options.name,
            replica=index,
        ) from error
    return MonarchMesh(group)


async def _start_replicas(options: Options, starter: Starter) -> list[Replica]:
    """All replicas, ready; or none, and the first error."""
    starting = [asyncio.ensure_future(starter.start(index)) for index in range(options.num_replicas)]
    try:
        return await _all(starting)
    except BaseException:
        for task in starting:
            task.cancel()
        started = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(r.stop() for r in started if isinstance(r, Replica)), return_exceptions=True)
        raise


T = TypeVar("T")


async def _all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """The results in order. Waits for all before it raises the first error, so that none is left running unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
