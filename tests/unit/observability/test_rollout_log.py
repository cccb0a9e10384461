"""rollouts.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from forge.observability.rollout_log import LONGEST_TEXT, RolloutLog
from forge.types import Episode, Group


def group(number: int, responses: list[str]) -> Group:
    episodes = [
        Episode(
            prompt="2 + 2?",
            response=response,
            target="4",
            prompt_ids=[1, 2],
            response_ids=[3, 4, 5],
            generator_logprobs=[-0.1, -0.2, -0.3],
            response_mask=[True] * 3,
            reward=1.0,
            rewards={"MathReward": 1.0},
            advantage=0.5,
            policy_version=2,
            policy_version_max=3,
        )
        for response in responses
    ]
    return Group(id=number, sample_id=f"sum-{number}", episodes=episodes)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_episode_is_written_with_all_that_its_reward_came_from(run_folder: Path) -> None:
    RolloutLog(run_folder / "rollouts.jsonl").write(5, [group(17, ["<answer>4</answer>"])])
    assert read(run_folder / "rollouts.jsonl") == [
        {
            "step": 5,
            "kind": "train",
            "outcome": "trained",
            "group": 17,
            "sample": "sum-17",
            "epoch": 0,
            "prompt": "2 + 2?",
            "response": "<answer>4</answer>",
            "target": "4",
            "reward": 1,
            "rewards": {"MathReward": 1},
            "advantage": 0.5,
            "version": 2,
            "version_max": 3,
            "tokens": 3,
            "finish_reason": "stop",
        }
    ]


def test_evaluation_is_told_apart_from_training(run_folder: Path) -> None:
    log = RolloutLog(run_folder / "rollouts.jsonl")
    log.write(0, [group(0, ["a"])], kind="eval")
    log.write(1, [group(1, ["b"])])
    assert [r["kind"] for r in read(run_folder / "rollouts.jsonl")] == ["eval", "train"]


def test_a_resumed_run_drops_the_rollouts_of_the_steps_that_it_does_again(run_folder: Path) -> None:
    path = run_folder / "rollouts.jsonl"
    log = RolloutLog(path)
    for step in (1, 2, 3):
        log.write(step, [group(step, ["a", "b"])])
    log.close()
    RolloutLog(path, resume_step=1).write(2, [group(9, ["c"])])
    assert [(r["step"], r["response"]) for r in read(path)] == [(1, "a"), (1, "b"), (2, "c")]


def test_the_bound_keeps_whole_groups(run_folder: Path) -> None:
    log = RolloutLog(run_folder / "rollouts.jsonl", per_step=5)
    log.write(1, [group(1, ["a", "b"]), group(2, ["c", "d"]), group(3, ["e", "f"])])
    assert [r["response"] for r in read(run_folder / "rollouts.jsonl")] == ["a", "b", "c", "d"]


def test_a_line_break_or_a_lone_surrogate_in_a_response_stays_within_its_line(run_folder: Path) -> None:
    RolloutLog(run_folder / "rollouts.jsonl").write(1, [group(1, ["a\nb\u2028\ud800"])])
    assert [json.loads(line)["response"] for line in (run_folder / "rollouts.jsonl").open()] == ["a\nb\u2028?"]


def test_an_endless_response_is_cut_in_the_middle(run_folder: Path) -> None:
    RolloutLog(run_folder / "rollouts.jsonl").write(1, [group(1, ["x" * LONGEST_TEXT + "END"])])
    response = read(run_folder / "rollouts.jsonl")[0]["response"]
    assert "3 characters left out" in response
    assert response.endswith("END")
