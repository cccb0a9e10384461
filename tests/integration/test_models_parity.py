"""A loaded model computes what transformers computes on the same folder, and writes folders that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge.attention import TreeLayout
from forge.models.architectures import UnsupportedArchitecture
from forge.models.build import load_model
from forge.models.hf_folder import ModelNotFound
from forge.models.loaded import LoadedModel
from tests.unit.models.tiny_checkpoints import ALONE, CHECKPOINTS, make_checkpoint


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(
        str(folder), **{"parallelism": ALONE, "dtype": "float32", "device": "cpu", "seq_len": 128, **options}
    )


def logits(model: LoadedModel, tokens: torch.Tensor, positions: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.hidden_states(tokens[None], positions[None], layout))


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One checkpoint in its folder, with transformers and with us."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(request.param, folder)
    return SimpleNamespace(name=request.param, folder=folder, theirs=theirs, ours=load(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    make_checkpoint("smollm2", tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def test_logits_of_a_whole_sequence_are_those_of_transformers(pair: SimpleNamespace) -> None:
    tokens = torch.randint(0, 96, (120,), generator=torch.Generator().manual_seed(1))
    ours = logits(pair.ours, tokens, torch.arange(120), TreeLayout.from_lengths([120]))
    theirs = pair.theirs(tokens[None]).logits[0]
    assert theirs.std() > 0.5  # random weights that say nothing would prove nothing
    assert (ours - theirs).abs().max() < 1e-4


@torch.no_grad()
def test_logits_of_left_padded_sequences_are_those_of_transformers(pair: SimpleNamespace) -> None:
    tokens = torch.randint(1, 96, (2, 30), generator=torch.Generator().manual_seed(2))
    tokens[1, :11] = 0
    mask = (torch.arange(30) >= torch.tensor([[0], [11]])).long()
    theirs = pair.theirs(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    packed = torch.cat([tokens[0], tokens[1, 11:]])
    ours = logits(pair.ours, packed, torch.cat([torch.arange(30), torch.arange(19)]), TreeLayout.from_lengths([30, 19]))
    assert (ours[:30] - theirs[0]).abs().max() < 1e-4
    assert (ours[30:] - theirs[1, 11:]).abs().max() < 1e-4


@torch.no_grad()
def test_responses_behind_a_shared_prompt_are_computed_as_if_each_stood_alone(pair: SimpleNamespace) -> None:
    prompt, first, second = torch.randint(1, 96, (3, 10), generator=torch.Generator().manual_seed(3))
    layout = TreeLayout(segments=((0, 10, -1), (10, 20, 0), (20, 30, 0)))
    ours = logits(pair.ours, torch.cat([prompt, first, second]), layout.positions(), layout)
    for start, response in ((10, first), (20, second)):
        theirs = pair.theirs(torch.cat([prompt, response])[None]).logits[0, 10:]
        assert (ours[start : start + 10] - theirs).abs().max() < 1e-4


def test_gradients_are_those_of_transformers(pair: SimpleNamespace) -> None:
    tokens = torch.randint(0, 96, (25,), generator=torch.Generator().manual_seed(4))
    pair.theirs.zero_grad()
    pair.theirs(tokens[None], labels=tokens[None]).loss.backward()
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    model = load(pair.folder)
    hidden = model.hidden_states(tokens[None], torch.arange(25)[None], TreeLayout.from_lengths([25]))
    torch.nn.functional.cross_entropy(model.logits(hidden[:-1]), tokens[1:]).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-5), name


def test_weights_have_the_names_and_values_of_transformers(pair: SimpleNamespace) -> None:
    theirs = pair.theirs.state_dict()
    if pair.ours.architecture.tied:
        del theirs["lm_head.weight"]  # as in a saved folder
    ours = dict(pair.ours.hf_tensors(torch.float32))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {tensor.dtype for _, tensor in pair.ours.hf_tensors(torch.bfloat16)} == {torch.bfloat16}


def test_parameters_are_counted_as_transformers_counts_them(pair: SimpleNamespace) -> None:
    assert pair.ours.architecture.num_parameters == pair.theirs.num_parameters()


@torch.no_grad()
def test_a_changed_and_saved_model_gives_transformers_the_same_logits(pair: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load(pair.folder)
    for _, parameter in model.named_parameters():
        parameter.mul_(1.05)
    model.save_hf(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(40)
    ours = logits(model, tokens, torch.arange(40), TreeLayout.from_lengths([40]))
    assert theirs.dtype == torch.float32
    assert (ours - theirs(tokens[None]).logits[0]).abs().max() < 1e-4
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == '{"model_max_length": 256}\n'


def test_handed_out_weights_are_not_changed_by_the_next_step(folder: Path) -> None:
    model = load(folder)
    handed_out = dict(model.hf_tensors(torch.float32))
    before = {name: tensor.clone() for name, tensor in handed_out.items()}
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(1.0)
    assert all(torch.equal(handed_out[name], before[name]) for name in before)


def test_logits_of_chunks_and_of_the_weight_are_those_of_the_whole(pair: SimpleNamespace) -> None:
    hidden = torch.randn(10, 32)
    whole = pair.ours.logits(hidden)
    torch.testing.assert_close(torch.cat([pair.ours.logits(chunk) for chunk in hidden.split(3)]), whole)
    torch.testing.assert_close(hidden @ pair.ours.output_weight().T, whole)


def test_a_frozen_model_has_no_gradients_and_in_bf16_no_float32_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether there is one already depends on the other tests of this process.
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("started a process group")
    )
    frozen = load(folder, trainable=False, dtype="bfloat16")
    assert not any(p.requires_grad for p in frozen.module.parameters())
    assert {p.dtype for p in frozen.module.parameters()} == {torch.bfloat16}
    tokens, layout = torch.arange(20), TreeLayout.from_lengths([20])
    exact = logits(load(folder), tokens, torch.arange(20), layout)
    # 8 significant bits through two layers: a few percent of the logits' spread.
    assert (logits(frozen, tokens, torch.arange(20), layout) - exact).abs().mean() < 0.05 * exact.std()


def test_weights_in_several_files_are_read_by_their_index(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in files.items():
        save_file({name: whole[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    loaded = dict(load(folder).hf_tensors(torch.float32))
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_a_tied_checkpoint_that_also_holds_its_output_projection_is_read(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    copy = whole["model.embed_tokens.weight"].clone()
    save_file(
        {**whole, "lm_head.weight": copy, "model.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors"
    )
    assert "lm_head.weight" not in dict(load(folder).hf_tensors(torch.float32))


def test_a_missing_weight_is_named(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    del whole["model.layers.1.mlp.up_proj.weight"]
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(ModelNotFound, match=r"1 weights are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_superfluous_weight_is_named(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    save_file({**whole, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, folder / "model.safetensors")
    with pytest.raises(ModelNotFound, match=r"do not belong to this architecture, first model\.layers\.0\.self_attn"):
        load(folder)


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)
    with pytest.raises(ModelNotFound, match=r"down_proj\.weight has shape \[32, 48\], config\.json says \[32, 64\]"):
        load(folder)


def test_a_torn_weight_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelNotFound, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="does not start from random weights"):
        load(folder)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(folder: Path) -> None:
    edit_config(folder, architectures=["MixtralForCausalLM"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedArchitecture, match="MixtralForCausalLM"):
        load(folder)


def test_a_sequence_longer_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.seq_len must be between 1 and .*\(256\), got 257"):
        load(folder, seq_len=257)


def test_a_position_past_seq_len_is_an_error_and_not_a_wrong_number(folder: Path) -> None:
    model = load(folder, seq_len=16)
    with pytest.raises(RuntimeError, match="position_ids exceed"):
        logits(model, torch.arange(17), torch.arange(17), TreeLayout.from_lengths([17]))


def test_degrees_that_do_not_make_up_the_processes_are_refused_with_the_product(folder: Path) -> None:
    degrees = SimpleNamespace(**{**vars(ALONE), "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2})
    with pytest.raises(
        ValueError, match=r"data_parallel_shard 2 x tensor_parallel 2 x pipeline_parallel 1 = 4 and there are 1\."
    ):
        load(folder, parallelism=degrees)


@pytest.mark.parametrize("kind", ["context", "expert"])
def test_kinds_of_parallelism_that_there_are_not_are_refused(folder: Path, kind: str) -> None:
    degrees = SimpleNamespace(**{**vars(ALONE), f"{kind}_parallel_degree": 2})
    with pytest.raises(ValueError, match=rf"parallelism\.{kind}_parallel_degree must be 1, got 2"):
        load(folder, parallelism=degrees)


def test_checking_an_architecture_imports_neither_torch_nor_torchtitan() -> None:
    code = "import sys, forge.models.architectures, forge.models.hf_folder, forge.models.memory; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    ).stdout.split()
    assert not {"torch", "torchtitan", "transformers", "safetensors"} & set(modules)


def test_importing_the_builder_does_not_import_torchtitan() -> None:
    code = "import sys, forge.models.build; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    ).stdout.split()
    assert "torchtitan" not in modules
