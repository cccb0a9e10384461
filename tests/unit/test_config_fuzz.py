"""Whatever a file or a command line holds, the answer is a config or a ConfigError."""

from functools import cache

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.config import ConfigError, GRPOConfig, load_config, to_yaml
from forge.config.fields import all_keys

KEYS = [".".join(key) for key, _, _ in all_keys(GRPOConfig) if "N" not in key]
NAMES = sorted({part for key in KEYS for part in key.split(".")})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["???", "${model}", "${nope}", "${oc.env:HOME}", "\\${x}", "a.B", "~x/y", "0" * 9, "1e400"])
)
NODES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


@cache
def path_for(folder):
    return folder / "c.yaml"


def try_load(path, overrides=()):
    """The config, or None with the error's message built."""
    try:
        return load_config(GRPOConfig, path, overrides)
    except ConfigError as error:
        message = str(error)
    assert "Fix: " in message
    return None


@QUIET
@given(tree=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), NODES, max_size=5))
def test_any_yaml_gives_a_config_or_an_error_in_words(tmp_path_factory, tree):
    path = path_for(tmp_path_factory.getbasetemp())
    path.write_text(yaml.safe_dump({"model": "toy", **tree}), encoding="utf-8")
    try_load(path)


@QUIET
@given(data=st.binary(max_size=60) | st.text(alphabet="{}[]:,-!&*|>?'\"% \nab01.$~#\\", max_size=60).map(str.encode))
def test_any_bytes_give_a_config_or_an_error_in_words(tmp_path_factory, data):
    path = path_for(tmp_path_factory.getbasetemp())
    path.write_bytes(b"model: toy\n" + data)
    try_load(path)


@QUIET
@given(
    overrides=st.lists(
        st.tuples(st.sampled_from(KEYS) | st.text(max_size=8), st.text(max_size=10) | SCALARS.map(str)).map("=".join)
        | st.text(max_size=8).filter(lambda text: text.strip("-").replace("-", "_") not in KEYS),
        max_size=4,
    )
)
def test_any_command_line_gives_a_config_or_an_error_in_words(tmp_path_factory, overrides):
    path = path_for(tmp_path_factory.getbasetemp())
    path.write_text("model: toy")
    try_load(path, [text for text in overrides if text not in ("-h", "--help") and "config" not in text])


@QUIET
@given(key=st.sampled_from(KEYS), value=NODES)
def test_one_key_with_any_value_is_accepted_whole_or_refused(tmp_path_factory, key, value):
    path = path_for(tmp_path_factory.getbasetemp())
    for part in reversed(key.split(".")):
        value = {part: value}
    path.write_text(yaml.safe_dump({"model": "toy", **value}), encoding="utf-8")
    cfg = try_load(path)
    if cfg is not None:  # and what it became is written and read without loss
        path.write_text(to_yaml(cfg), encoding="utf-8")
        assert load_config(GRPOConfig, path) == cfg
