"""ForgeActor: a plain class whose public methods can be called from another process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from forge.config import RestartsConfig
from forge.service.routers import LeastLoaded, Router

if TYPE_CHECKING:
    from forge.service.handles import ActorHandle, Service

_LIFECYCLE = {"setup", "shutdown"}
_CLASS_API = {"options", "as_actor", "as_service"}
_HANDLE_API = {"name", "replica", "replicas", "retried", "session", "describe", "health", "restart"}


class ForgeActor:
    """Base of everything that runs in a process of its own.

    A subclass is an ordinary class: it can be built and called in the same process, and tests do so. Its public methods
    are its endpoints. Async ones run side by side on the process's event loop; the others run one at a time, always on
    the same thread, which also runs `__init__` (torch.distributed and OpenMP want that). `async def setup(self)`, if
    there is one, runs after `__init__` and before the first call; `async def shutdown(self)` before the process ends.

    Example:
        >>> class Counter(ForgeActor):
        ...     def __init__(self, start: int = 0) -> None:
        ...         self.n = start
        ...     def add(self, k: int) -> int:
        ...         self.n += k
        ...         return self.n
        >>> Counter(start=1).add(2)                                   # in this process
        3
        >>> counter = await Counter.options(procs=1).as_actor(start=1)   # in another
        >>> await counter.add.call(2)
        3
    """

    @classmethod
    def options(
        cls,
        *,
        procs: int = 1,
        num_replicas: int = 1,
        with_gpus: bool = False,
        gpus_per_proc: int = 1,
        threads: int | None = None,
        env: dict[str, str] | None = None,
        name: str | None = None,
        router: Callable[[], Router] = LeastLoaded,
        restarts: RestartsConfig | None = None,
    ) -> Options:
        """How and where to run this actor; see `Options` for the fields."""
        return Options(
            actor=cls,
            procs=procs,
            num_replicas=num_replicas,
            with_gpus=with_gpus,
            gpus_per_proc=gpus_per_proc,
            threads=threads,
            env=dict(env or {}),
            name=name or cls.__name__.lower(),
            router=router,
            restarts=restarts,
        )

    @classmethod
    async def as_actor(cls, **init_kwargs: Any) -> ActorHandle:
        """`cls.options().as_actor(**init_kwargs)`."""
        return await cls.options().as_actor(**init_kwargs)

    @classmethod
    async def as_service(cls, **init_kwargs: Any) -> Service:
        """`cls.options().as_service(**init_kwargs)`."""
        return await cls.options().as_service(**init_kwargs)


@dataclass(kw_only=True, slots=True)
class Options:
    """An actor class, and how many processes of it to start where."""

    actor: type[ForgeActor]
    procs: int = 1
    """Processes of one replica. A call reaches all of them; the result is that of rank 0."""
    num_replicas: int = 1
    """Independent copies; a call to a service reaches one of them."""
    with_gpus: bool = False
    """`gpus_per_proc` GPUs for each process, and no other is visible to it."""
    gpus_per_proc: int = 1
    """More than one for a process that starts workers of its own, as vLLM does."""
    threads: int | None = None
    """CPU threads of one process; None leaves it to the provisioner's plan."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the processes, on top of the parent's."""
    name: str
    """Names the service in messages, log files and process lists."""
    router: Callable[[], Router] = LeastLoaded
    """Makes the router of a service: `LeastLoaded` or `RoundRobin`."""
    restarts: RestartsConfig | None = None
    """How often replicas that died are replaced; `max=0` is never. None: as the provisioner says."""

    def __post_init__(self) -> None:
        for key in ("procs", "num_replicas", "gpus_per_proc"):
            value = getattr(self, key)
            if value < 1:
                raise ValueError(f"{self.name}: {key} must be at least 1, got {value}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(
                f"{self.name}: threads must be at least 1, got {self.threads}; leave it out for automatic."
            )
        taken = sorted(_HANDLE_API & endpoints_of(self.actor).keys())
        if taken:
            raise TypeError(
                f"{self.actor.__name__}.{taken[0]} cannot be an endpoint: a service has a `{taken[0]}` of its own. "
                "Rename the method, or start its name with an underscore."
            )

    async def as_actor(self, **init_kwargs: Any) -> ActorHandle:
        """Starts one actor on `procs` processes and waits until it is ready.

        Raises:
            What `__init__` or `setup` raised, with the remote traceback as its cause; nothing is left running.
        """
        from forge.service.handles import start_actor

        if self.num_replicas != 1:
            raise ValueError(
                f"{self.name}: as_actor starts a single copy, but num_replicas is {self.num_replicas}. Use as_service."
            )
        return await start_actor(self, init_kwargs)

    async def as_service(self, **init_kwargs: Any) -> Service:
        """Starts `num_replicas` copies and waits until all are ready. Raises as `as_actor` does."""
        from forge.service.handles import start_service

        return await start_service(self, init_kwargs)


F = TypeVar("F", bound=Callable[..., Any])

_REPEATED = "__forge_repeated__"


def repeated_on_restart(method: F) -> F:
    """Marks a method that sets a state which all replicas of a service share, such as the version of their weights.

    A replica that takes the place of one that died gets the last call that was fanned out, before any other request.
    """
    setattr(method, _REPEATED, True)
    return method


def is_repeated(actor: type[ForgeActor], method: str) -> bool:
    """Whether `repeated_on_restart` marks the method."""
    return getattr(getattr(actor, method), _REPEATED, False)


def endpoints_of(actor: type[ForgeActor]) -> dict[str, Callable[..., Any]]:
    """The methods of `actor` that can be called from outside, by name."""
    return {
        name: function
        for name, function in inspect.getmembers(actor, callable)
        if not name.startswith("_") and name not in _LIFECYCLE | _CLASS_API and not inspect.isclass(function)
    }
