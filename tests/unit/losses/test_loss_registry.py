"""From the config's `loss` to a module, and what that module is given."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from forge.losses import LOSSES, DAPOLoss, GRPOLoss, SimpleGRPOLoss, build_loss, loss_arguments, needs_reference
from forge.losses.custom_loss import CustomLoss

ALL_ARGUMENTS = {"logprobs", "generator_logprobs", "ref_logprobs", "advantages", "padding_mask"}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_name_of_the_table_is_built_and_takes_what_the_trainer_has(name):
    loss = build_loss(name, defaults={"max_response_len": 8})
    assert type(loss) is LOSSES[name]
    assert loss_arguments(loss) == ALL_ARGUMENTS


def test_defaults_go_where_the_constructor_names_them_and_args_win():
    loss = build_loss(
        {"name": "dapo", "args": {"clip_high": 0.3}}, defaults={"clip_low": 0.1, "clip_high": 0.5, "beta": 0.2}
    )
    assert (loss.clip_low, loss.clip_high, loss.beta) == (0.1, 0.3, 0.2)


def test_a_default_of_none_leaves_the_loss_its_own():
    loss = build_loss("dapo", defaults={"clip_low": None, "clip_high": None, "beta": None})
    assert (loss.clip_low, loss.clip_high, loss.beta) == (0.2, 0.28, 0.0)


def test_a_clip_that_finds_no_taker_is_warned_about():
    with pytest.warns(UserWarning, match=r"grpo.clip_low=0.2 has no effect: the loss cispo has no such argument"):
        build_loss("cispo", defaults={"clip_low": 0.2})


def test_gspo_refuses_the_clips_of_grpo():
    with pytest.raises(ValueError, match=r"loss gspo: GSPOLoss: clip_low must be below 0.1, got 0.2"):
        build_loss("gspo", defaults={"clip_low": 0.2, "clip_high": 0.28})


def test_dr_grpo_without_its_length_says_how_to_give_it():
    with pytest.raises(ValueError, match=r"loss dr_grpo needs args: max_response_len"):
        build_loss("dr_grpo")


def test_an_import_path_with_arguments_is_built():
    loss = build_loss(
        {"name": "forge.losses.custom_loss.CustomLoss", "args": {"clip_range": 0.3}}, defaults={"beta": 0.5}
    )
    assert isinstance(loss, CustomLoss)
    assert (loss.clip_range, loss.beta) == (0.3, 0.5)
    assert loss_arguments(loss) == {"logprobs", "ref_logprobs", "advantages", "padding_mask"}
    assert isinstance(build_loss("forge.losses.reinforce_loss.ReinforceLoss"), LOSSES["reinforce"])


def test_a_users_own_file_is_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "my_losses_of_a_test.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            class Mean(nn.Module):
                def forward(self, logprobs, padding_mask):
                    return -(logprobs * padding_mask).sum()
            class Critic(nn.Module):
                def forward(self, logprobs, values): ...
            function = len
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert loss_arguments(build_loss("my_losses_of_a_test.Mean")) == {"logprobs", "padding_mask"}
    with pytest.raises(
        ValueError, match=r"Critic asks for 'values', which does not exist.*logprobs, generator_logprobs"
    ):
        build_loss("my_losses_of_a_test.Critic")
    with pytest.raises(ValueError, match=r"is not a class derived from torch.nn.Module"):
        build_loss("my_losses_of_a_test.function")
    with pytest.raises(ValueError, match="'Gone' in my_losses_of_a_test does not exist"):
        build_loss("my_losses_of_a_test.Gone")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dpao", r"loss 'dpao' is not known. There are simple_grpo, .*Did you mean 'dapo'\?"),
        (
            "no_such_module.Loss",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'.*PYTHONPATH",
        ),
        (
            {"name": "dapo", "args": {"clip_hihg": 0.3}},
            r"loss.args.clip_hihg: dapo has no such.*Did you mean 'clip_high'",
        ),
        ({"name": "dapo", "arg": {}}, "loss must be a name"),
        ({"args": {}}, "loss must be a name"),
        (3, "loss must be a name"),
        ({"name": "cispo", "args": {"ratio_max": 0.2}}, "loss cispo: CISPOLoss: ratio_max must be at least 1"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_loss(spec)
    assert "\n" not in str(caught.value)


class Keywords(nn.Module):
    def forward(self, **tensors): ...


class OptionalExtra(nn.Module):
    def forward(self, logprobs, *, temperature=1.0): ...


class NoLogprobs(nn.Module):
    def forward(self, advantages): ...


class Typo(nn.Module):
    def forward(self, logprobs, ref_logprob): ...


def test_the_signature_decides_what_a_loss_is_given():
    assert loss_arguments(Keywords()) == ALL_ARGUMENTS
    assert loss_arguments(OptionalExtra()) == {"logprobs"}
    with pytest.raises(ValueError, match="does not take 'logprobs': without them it has no gradient"):
        loss_arguments(NoLogprobs())
    with pytest.raises(ValueError, match=r"asks for 'ref_logprob'.*Did you mean 'ref_logprobs'\?"):
        loss_arguments(Typo())


def test_a_module_that_is_already_built_is_checked_and_returned():
    loss = GRPOLoss()
    assert build_loss(loss) is loss
    with pytest.raises(ValueError, match="ref_logprob"):
        build_loss(Typo())


def test_who_needs_a_reference():
    assert [needs_reference(x) for x in (SimpleGRPOLoss(), SimpleGRPOLoss(beta=0.0), DAPOLoss(), CustomLoss())] == [
        True,
        False,
        False,
        True,
    ]


def test_losses_and_logprobs_need_torch_alone():
    code = (
        "import sys, forge.losses, forge.logprobs, forge.advantages;"
        "print([m for m in ('transformers', 'vllm', 'monarch', 'torchtitan', 'torchstore') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_advantages_need_not_even_torch():
    code = "import sys, forge.advantages; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_example_of_the_contract_runs():
    from forge.losses.reinforce_loss import ReinforceLoss

    given = {
        "logprobs": torch.zeros(2, 3, requires_grad=True),
        "ref_logprobs": torch.zeros(2, 3),
        "advantages": torch.ones(2, 1),
        "padding_mask": torch.ones(2, 3),
    }
    assert SimpleGRPOLoss(beta=0.1)(**given).item() == -1.0
    assert ReinforceLoss(clip_ratio=0.2)(**given).item() == 0.0
