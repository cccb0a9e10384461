"""Episodes → padded dicts: hand-worked shapes, shifts and masks."""

import torch

from forge.batching import collate, make_batch, split_groups
from forge.types import Episode, Group


def episode(
    prompt: list[int], response: list[int], *, advantage: float = 0.0, ref: list[float] | None = None
) -> Episode:
    return Episode(
        prompt="",
        response="",
        target="",
        prompt_ids=prompt,
        response_ids=response,
        generator_logprobs=[-0.1 * (i + 1) for i in range(len(response))],
        response_mask=[True] * len(response),
        advantage=advantage,
        ref_logprobs=ref,
    )


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    inputs, targets = collate([episode([5], [1, 2], advantage=1.5), episode([6, 7], [3], advantage=-2.0)], pad_id=0)
    assert inputs["tokens"].tolist() == [[0, 5, 1, 2], [6, 7, 3, 0]]
    assert inputs["attention_mask"].tolist() == [[False, True, True, True], [True, True, True, False]]
    assert targets["response"].tolist() == [[1, 2], [3, 0]]
    assert targets["padding_mask"].tolist() == [[True, True], [True, False]]
    assert targets["advantages"].tolist() == [[1.5], [-2.0]]
    torch.testing.assert_close(targets["generator_logprobs"], torch.tensor([[-0.1, -0.2], [-0.1, 0.0]]))
    assert "ref_logprobs" not in targets


def test_a_pad_id_that_is_also_a_real_token_changes_no_mask():
    inputs, targets = collate([episode([9, 9], [9]), episode([1], [2, 9])], pad_id=9)
    assert inputs["attention_mask"].tolist() == [[True, True, True, False], [False, True, True, True]]
    assert targets["padding_mask"].tolist() == [[True, False], [True, True]]


def test_tokens_that_an_environment_wrote_are_context_and_not_trained():
    e = episode([1], [2, 3, 4])
    e.response_mask = [True, False, True]
    inputs, targets = collate([e], pad_id=0)
    assert inputs["attention_mask"].tolist() == [[True, True, True, True]]
    assert targets["padding_mask"].tolist() == [[True, False, True]]


def test_reference_logprobs_are_there_when_every_episode_has_them():
    _, targets = collate([episode([1], [2], ref=[-0.7]), episode([1], [2, 3], ref=[-0.3, -0.4])], pad_id=0)
    torch.testing.assert_close(targets["ref_logprobs"], torch.tensor([[-0.7, 0.0], [-0.3, -0.4]]))


def test_groups_are_dealt_whole_and_evenly():
    groups = [Group(id=i, sample_id="", episodes=[episode([1], [1] * (n - 1))]) for i, n in enumerate([9, 5, 4, 1])]
    assert [[g.id for g in shard] for shard in split_groups(groups, ranks=2)] == [[0, 3], [1, 2]]


def test_a_rank_without_groups_gets_empty_tensors_of_the_same_names():
    inputs, targets = make_batch(
        [Group(id=0, sample_id="", episodes=[episode([1], [2], ref=[-1.0])])], ranks=2, pad_id=0
    )
    assert targets[0].keys() == targets[1].keys()  # ranks exchange them one by one
    assert "ref_logprobs" in targets[1]
    assert [i["tokens"].shape for i in inputs] == [(1, 2), (0, 2)]
    assert targets[1]["advantages"].shape == (0, 1)
    assert targets[1]["padding_mask"].shape == (0, 1)
