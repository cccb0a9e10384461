"""The order of a pipeline's work, and which layers a stage holds."""

from __future__ import annotations

import pytest

from forge.models.architectures import check_architecture, check_pipeline_parallel
from forge.models.pipeline import one_forward_one_backward, stage_of_layer
from forge.types import UserError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def order(stage: int, stages: int, rows: int) -> str:
    return " ".join(f"{step[0]}{row}" for step, row in one_forward_one_backward(stage, stages, rows))


def test_three_stages_and_four_rows_by_hand() -> None:
    assert order(0, 3, 4) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert order(1, 3, 4) == "f0 f1 b0 f2 b1 f3 b2 b3"
    assert order(2, 3, 4) == "f0 b0 f1 b1 f2 b2 f3 b3"


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_each_row_passes_once_each_way_and_few_are_under_way(stages: int, rows: int) -> None:
    for stage in range(stages):
        steps = list(one_forward_one_backward(stage, stages, rows))
        for direction in ("forward", "backward"):
            assert [row for step, row in steps if step == direction] == list(range(rows))
        under_way = most = 0
        for step, _ in steps:
            under_way += 1 if step == "forward" else -1
            most = max(most, under_way)
        assert most == min(rows, stages - stage)


@pytest.mark.parametrize(
    ("n_layers", "stages", "sizes"), [(3, 2, [2, 1]), (4, 4, [1, 1, 1, 1]), (30, 4, [8, 8, 7, 7]), (5, 1, [5])]
)
def test_layers_are_shared_out_evenly_and_in_order(n_layers: int, stages: int, sizes: list[int]) -> None:
    held = [stage_of_layer(layer, n_layers=n_layers, stages=stages) for layer in range(n_layers)]
    assert held == sorted(held)
    assert [held.count(stage) for stage in range(stages)] == sizes


def test_a_pipeline_needs_a_layer_for_each_stage_and_separate_embeddings() -> None:
    check_pipeline_parallel(check_architecture(QWEN3), 3)
    with pytest.raises(UserError, match=r"pipeline_parallel_degree must be at most 3, .* got 4"):
        check_pipeline_parallel(check_architecture(QWEN3), 4)
    tied = check_architecture({**QWEN3, "tie_word_embeddings": True})
    check_pipeline_parallel(tied, 1)
    with pytest.raises(UserError, match=r"must be 1 for a model with tied embeddings .* got 2"):
        check_pipeline_parallel(tied, 2)
