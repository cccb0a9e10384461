import pytest

from forge.service import ForgeActor
from forge.service.actor import endpoints_of


class Counter(ForgeActor):
    limit = 3

    class Helper:
        pass

    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n

    async def get(self):
        return self.n

    def _secret(self):
        return None

    async def setup(self):
        self.n += 100

    async def shutdown(self):
        self.n = -1


def test_an_actor_is_a_plain_class_when_built_directly():
    assert Counter(start=1).add(2) == 3


def test_endpoints_are_the_public_methods_without_setup_and_shutdown():
    assert set(endpoints_of(Counter)) == {"add", "get"}


def test_the_default_name_is_the_class_in_lower_case():
    assert Counter.options().name == "counter"
    assert Counter.options(name="tally").name == "tally"


@pytest.mark.parametrize(("key", "value"), [("procs", 0), ("num_replicas", -1), ("threads", 0)])
def test_counts_below_one_are_refused_with_name_value_and_rule(key, value):
    with pytest.raises(ValueError, match=rf"counter: {key} must be at least 1, got {value}"):
        Counter.options(**{key: value})


def test_an_endpoint_may_not_hide_a_method_of_the_handle():
    class Bad(ForgeActor):
        def session(self):
            return None

    with pytest.raises(TypeError, match=r"Bad.session cannot be an endpoint.*Rename"):
        Bad.options()


async def _as_actor():
    await Counter.options(num_replicas=2).as_actor()


def test_as_actor_refuses_replicas():
    import asyncio

    with pytest.raises(ValueError, match=r"num_replicas is 2\. Use as_service"):
        asyncio.run(_as_actor())
