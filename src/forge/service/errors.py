"""What can go wrong with a call that leaves the process."""


class ReplicaDied(RuntimeError):
    """A process of a replica ended while it was needed; the request was not answered.

    The message names the service and the replica, how the process ended (its signal or exit status) and the last lines
    of its log. Attributes name the place, so that a supervisor can act on it: `service` ("generator"), `replica`
    (0-based) and `rank` (the dead process within the replica, or None when it is not known which).
    """

    def __init__(self, message: str, *, service: str = "", replica: int = 0, rank: int | None = None) -> None:
        super().__init__(message)
        self.service = service
        self.replica = replica
        self.rank = rank


class NoHealthyReplica(ReplicaDied):
    """Every replica of a service is dead or stopped, so there is nobody to send a request to."""


class TooManyRestarts(RuntimeError):
    """Replicas of a service died more often than `restarts.max` allows; `__cause__` is the last death."""


class ActorFailed(RuntimeError):
    """A thread or task that an actor had started died of an exception; `__cause__` is its traceback."""


class RemoteError(RuntimeError):
    """Stands for an exception whose own type cannot cross to the caller: one that does not pickle, or one that would
    stop the caller itself (`SystemExit`, `KeyboardInterrupt`, `asyncio.CancelledError`)."""


class RemoteTraceback(Exception):
    """The traceback of the other process as text; it is the `__cause__` of the exception that the caller sees."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class HostLost(RuntimeError):
    """A machine does not answer any more; everything that ran there is gone. `host` is its name in the config."""

    def __init__(self, message: str, *, host: str) -> None:
        super().__init__(message)
        self.host = host
