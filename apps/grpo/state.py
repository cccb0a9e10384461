"""What of the controller has to survive: one moment of a run, between two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge.data.datasets import Sample
from forge.observability.rollout_log import Outcome
from forge.types import Episode, Group

if TYPE_CHECKING:
    from apps.grpo.main import Grpo


@dataclass(kw_only=True, slots=True)
class Moment:
    """The controller between two steps, before the weights of the last one are sent and any group starts under them.

    Everything in it is a copy, or does not change any more: it may be written while the run goes on.
    """

    step: int
    """Optimizer steps done."""
    samples: dict[str, int]
    """The data position."""
    next_group: int
    """The id of the group that starts next."""
    finished: list[Group]
    """Groups that wait to be trained."""
    in_flight: list[tuple[int, Sample]]
    """Groups that are not finished: they start once more, with the same problems."""
    set_aside: list[tuple[Outcome, Group]]
    """Groups that are not trained and not in rollouts.jsonl yet, with the outcome."""
    baseline: dict[str, float]
    """The held-out measures before training."""
    evaluated: int = -1
    """The step after which held-out problems were last answered; a stopped run may have had no time for those due."""
    flat: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)


def moment_of(grpo: Grpo) -> Moment:
    """The moment in which `grpo` is."""
    return Moment(
        step=grpo.steps_done,
        samples=grpo.parts.samples.state_dict(),
        next_group=grpo.buffer.next_id,
        finished=grpo.buffer.finished,
        in_flight=list(grpo.in_flight.items()),
        set_aside=grpo.aside(),
        baseline=grpo.baseline,
        evaluated=grpo.evaluated,
        flat=grpo.flat.state_dict(),
        failures=grpo.budget.state_dict(),
        health=grpo.run.health.state_dict(),
    )


def go_on_from(state: dict[str, Any], grpo: Grpo) -> Moment:
    """Brings a new `grpo` to the moment that a checkpoint's state.json holds, and returns that."""
    moment = read_moment(state)
    grpo.parts.samples.load_state_dict(moment.samples)
    grpo.in_flight = dict(moment.in_flight)
    grpo.buffer.load(finished=moment.finished, running=list(grpo.in_flight), next_id=moment.next_group)
    grpo.set_aside = list(moment.set_aside)
    grpo.baseline, grpo.evaluated = moment.baseline, moment.evaluated
    grpo.flat.load_state_dict(moment.flat)
    grpo.budget.load_state_dict(moment.failures)
    grpo.failed_before = grpo.budget.failed
    grpo.run.health.load_state_dict(moment.health)
    return moment


def read_moment(state: dict[str, Any]) -> Moment:
    """A moment from a checkpoint's state.json."""
    return Moment(
        **{
            **state,
            "finished": [_group(g) for g in state["finished"]],
            "in_flight": [(i, Sample(**s)) for i, s in state["in_flight"]],
            "set_aside": [(outcome, _group(g)) for outcome, g in state["set_aside"]],
        }
    )


def _group(state: dict[str, Any]) -> Group:
    return Group(**{**state, "episodes": [Episode(**e) for e in state["episodes"]]})
