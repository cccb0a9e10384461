"""Which weights a generator takes when those it was told of are gone."""

import asyncio

import pytest

from forge.actors.generator import _fetch
from forge.weights import UnknownVersion


class Store:
    """Versions come and go while somebody fetches."""

    def __init__(self, *moments):
        self.moments = list(moments)  # what exists at each fetch

    async def fetch(self, version):
        self.now = self.moments.pop(0)
        if version not in self.now:
            raise UnknownVersion(f"There is no version {version}.")
        return {"w": version}

    async def versions(self):
        return self.now


def fetch(store, version):
    return asyncio.run(_fetch(store, version))


def test_a_version_that_exists_is_taken_though_there_is_a_newer_one():
    assert fetch(Store([3, 4]), 3) == (3, {"w": 3})


def test_one_that_was_dropped_is_replaced_by_the_newest_however_often_that_is_dropped_too():
    assert fetch(Store([4, 5], [6, 7], [7]), 3) == (7, {"w": 7})


def test_after_a_restart_of_the_trainer_the_newest_may_have_a_lower_number():
    assert fetch(Store([9, 7], [9, 7]), 8) == (7, {"w": 7})


@pytest.mark.parametrize("exist", [[], [3]])
def test_where_there_is_nothing_else_it_is_an_error(exist):
    class Broken(Store):
        async def fetch(self, version):
            self.now = exist
            raise UnknownVersion("gone")

    with pytest.raises(UnknownVersion, match="gone"):
        fetch(Broken(), 3)
