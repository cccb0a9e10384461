"""How the parts of a run end."""

import asyncio

import pytest

from forge.app import Stopped
from forge.parts import ending


class Thing:
    """A service or a provisioner that remembers how it was ended."""

    def __init__(self):
        self.ended = []

    async def shutdown(self, *, now=False):
        self.ended.append(now)


@pytest.mark.parametrize(
    ("error", "asked", "killed"),
    [
        (None, [False], []),
        (Stopped(2), [False], []),
        (BaseExceptionGroup("", [ExceptionGroup("", [Stopped(15)]), asyncio.CancelledError()]), [False], []),
        (ValueError("broken"), [], [True]),
        (ExceptionGroup("", [ValueError("broken")]), [], [True]),
        (asyncio.CancelledError(), [], [True]),
    ],
)
def test_services_are_asked_to_end_unless_the_run_failed(error, asked, killed):
    service, provisioner = Thing(), Thing()

    async def main():
        async with ending([service, None], provisioner):
            if error is not None:
                raise error

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(type(error)):
            asyncio.run(main())
    assert (service.ended, provisioner.ended) == (asked, killed)
