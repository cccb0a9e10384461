"""What callers hold: `Service` (replicas behind a router) and `ActorHandle` (one actor on one or more processes)."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Generic, TypeVar

from forge.service.actor import ForgeActor, Options, endpoints_of
from forge.service.errors import NoHealthyReplica
from forge.service.replica import Mesh, Replica
from forge.service.routers import Router
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
    """A running actor. `await handle.method.call(...)`, `await handle.shutdown()`."""

    def __init__(self, actor: type[ForgeActor], name: str, replica: Replica) -> None:
        super().__init__(actor, name)
        self.replica = replica

    def __getattr__(self, method: str) -> ActorEndpoint:
        self._check(method)
        return ActorEndpoint(self, method)

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

        Raises:
            NoHealthyReplica: none is left.
            ReplicaDied: the replica died before it answered.
            What the method raised.
        """
        replica = self._handle._pick()
        return (await replica.call(self._method, args, kwargs))[0]

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs it on every healthy replica; the results of their rank 0, by replica. Raises what any of them raised."""
        calls = [replica.call(self._method, args, kwargs) for replica in self._handle._healthy()]
        return [results[0] for results in await _all(calls)]


class Service(_Handle):
    """Replicas of one actor. `await service.method.route(...)` reaches one, `.fanout(...)` all."""

    def __init__(self, actor: type[ForgeActor], name: str, replicas: list[Replica], router: Router) -> None:
        super().__init__(actor, name)
        self.replicas = replicas
        self._router = router
        for replica in replicas:
            replica.on_death(self._replica_died)

    def __getattr__(self, method: str) -> ServiceEndpoint:
        self._check(method)
        return ServiceEndpoint(self, method)

    def session(self) -> Session:
        """`async with service.session():` every `route` inside, in tasks started there too, goes to one replica."""
        return Session(self)

    def describe(self) -> list[dict[str, Any]]:
        """For people and metrics: `{"replica", "state", "in_flight"}` of each replica."""
        return [{"replica": r.index, "state": r.state.value, "in_flight": r.in_flight} for r in self.replicas]

    async def shutdown(self) -> None:
        """Stops every replica; see `ActorHandle.shutdown`."""
        await _all([replica.stop() for replica in self.replicas])

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _healthy(self) -> list[Replica]:
        healthy = [replica for replica in self.replicas if replica.healthy]
        if not healthy:
            states = ", ".join(f"replica {r.index} {r.state.value}" for r in self.replicas)
            raise NoHealthyReplica(f"{self.name} has no healthy replica: {states}.", service=self.name)
        return healthy

    def _pick(self) -> Replica:
        sticky = _sticky.get({}).get(id(self))
        return sticky if sticky is not None else self._router.pick(self._healthy())

    def _replica_died(self, replica: Replica) -> None:
        """The one place that learns of a death. Requests in flight have failed with `ReplicaDied` by now.

        A supervisor belongs here: start a replacement, put it into `self.replicas`, and let `ServiceEndpoint.route`
        send the failed requests again.
        """
        logger.error("%s: replica %d of %d died", self.name, replica.index, len(self.replicas))


class Session:
    """A replica kept for a while, because it holds something that later requests need (a prefix cache, a game).

    It never moves: when its replica dies, requests in the session raise `ReplicaDied`, and a new session finds another.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._token: contextvars.Token[dict[int, Replica]] | None = None
        self.replica: Replica | None = None

    async def __aenter__(self) -> Session:
        self.replica = self._service._router.pick(self._service._healthy())
        self._token = _sticky.set({**_sticky.get({}), id(self._service): self.replica})
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._token is not None
        _sticky.reset(self._token)


async def start_actor(options: Options, init_kwargs: dict[str, Any]) -> ActorHandle:
    """See `Options.as_actor`."""
    (replica,) = await _start_replicas(options, init_kwargs)
    return ActorHandle(options.actor, options.name, replica)


async def start_service(options: Options, init_kwargs: dict[str, Any]) -> Service:
    """See `Options.as_service`."""
    return Service(options.actor, options.name, await _start_replicas(options, init_kwargs), options.router())


async def _start_replicas(options: Options, init_kwargs: dict[str, Any]) -> list[Replica]:
    """All replicas, ready; or none, and the first error."""
    from forge.provisioner import Provisioner

    provisioner = Provisioner.current()
    spec = encode((options.actor, init_kwargs))
    started: list[Replica] = []

    async def start(index: int) -> Replica:
        replica = Replica(await _new_mesh(provisioner, options, index), service=options.name, index=index)
        started.append(replica)
        await replica.start(spec)
        return replica

    try:
        return await _all([start(index) for index in range(options.num_replicas)])
    except BaseException:
        await asyncio.gather(*(replica.stop() for replica in started), return_exceptions=True)
        raise


async def _new_mesh(provisioner: Any, options: Options, index: int) -> Mesh:
    from forge.service.mesh import MonarchMesh

    group = await provisioner.spawn(
        options.name,
        replica=index,
        procs=options.procs,
        gpus_per_proc=options.gpus_per_proc if options.with_gpus else 0,
        threads=options.threads,
        env=options.env,
    )
    return MonarchMesh(group)


T = TypeVar("T")


async def _all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """The results in order. Waits for all before it raises the first error, so that none is left running unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
