"""Finding, reading and writing Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge.models.hf_folder import (
    ModelNotFound,
    WeightFiles,
    plan_shards,
    read_config,
    resolve_folder,
    write_config,
    write_weights,
)


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_a_folder_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"model folder '.*/missing' does not exist"):
        resolve_folder(str(tmp_path / "missing"))


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_folder(str(tmp_path))


@pytest.mark.parametrize("model", ["owner/name", "hf://owner/name"])
def test_a_hub_that_cannot_be_reached_gives_one_message(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    asked = []

    def unreachable(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match="neither a local folder nor available from the Hugging Face hub") as error:
        resolve_folder(model)
    assert asked == ["owner/name"]
    assert "no route to host" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFound, match="must hold a JSON object, got list"):
        read_config(tmp_path)


def test_shards_are_filled_in_order_and_a_large_tensor_stands_alone() -> None:
    assert plan_shards({"a": 3, "b": 2, "c": 9, "d": 1, "e": 4}, max_bytes=5) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_shards({}, max_bytes=5) == []


def test_weights_above_the_limit_are_written_in_files_with_an_index(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2), "c": torch.zeros(3)}
    write_weights(tmp_path, tensors.items(), sizes={"a": 16, "b": 16, "c": 12}, max_bytes=32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 44}, "weight_map": {"a": first, "b": first, "c": second}}
    assert load_file(tmp_path / second).keys() == {"c"}
    with WeightFiles(tmp_path) as files:
        assert files.shapes() == {"a": (4,), "b": (2, 2), "c": (3,)}
        assert files.read("a", offsets=[1], shape=[2]).tolist() == [1.0, 2.0]


def test_weights_below_the_limit_are_one_file_without_an_index(tmp_path: Path) -> None:
    write_weights(tmp_path, [("a", torch.ones(2))], sizes={"a": 8})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_box_of_a_matrix_is_read_without_the_rest(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        assert files.read("w", offsets=[1, 2], shape=[2, 2]).tolist() == [[6.0, 7.0], [10.0, 11.0]]


def test_pickled_weights_are_not_loaded_and_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin: pickled weights are not loaded"):
        WeightFiles(tmp_path)


def test_a_file_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"gone\.safetensors cannot be read"):
        WeightFiles(tmp_path)


def test_the_config_names_the_dtype_that_was_written_under_both_keys_in_use(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "tokenizer.json").write_text("tokens")
    (source / "generation_config.json").write_text("{}")
    (source / "training_args.bin").write_text("not ours")
    write_config(target, {"vocab_size": 5, "torch_dtype": "float16"}, source=source, dtype="bfloat16")
    assert read_config(target) == {"vocab_size": 5, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "generation_config.json"}
