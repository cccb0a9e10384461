"""Actors and services: plain Python classes that run in processes of their own.

    class Doubler(ForgeActor):
        def double(self, x: int) -> int:
            return 2 * x

    service = await Doubler.options(num_replicas=2).as_service()
    assert await service.double.route(21) == 42
    await service.shutdown()

`actor.py` what users write · `handles.py` what callers hold · `routers.py` who gets a request · `replica.py` one copy
of an actor and its health · `supervision.py` what becomes of one that died · `wire.py` how a call becomes bytes ·
`worker.py` the other end, inside the process · `procs.py`, `mesh.py` and `monarch_runtime.py` the processes, and
Monarch between them.
"""

from forge.service.actor import ForgeActor, Options, repeated_on_restart
from forge.service.errors import (
    ActorFailed,
    NoHealthyReplica,
    RemoteError,
    RemoteTraceback,
    ReplicaDied,
    TooManyRestarts,
)
from forge.service.handles import ActorHandle, Service, Session
from forge.service.routers import LeastLoaded, RoundRobin, Router

__all__ = [
    "ActorFailed",
    "ActorHandle",
    "ForgeActor",
    "LeastLoaded",
    "NoHealthyReplica",
    "Options",
    "RemoteError",
    "RemoteTraceback",
    "ReplicaDied",
    "RoundRobin",
    "Router",
    "Service",
    "Session",
    "TooManyRestarts",
    "repeated_on_restart",
]
