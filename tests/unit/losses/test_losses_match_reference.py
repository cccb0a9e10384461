"""Every loss against a second implementation: plain Python loops in float64, gradients by central differences."""

import math
import random

import pytest
import torch

from forge.losses import LOSSES, build_loss
from forge.losses.custom_loss import CustomLoss

TOLERANCE = 1e-6
MAX_LEN = 9


def k(estimator, delta):
    return delta * delta / 2 if estimator == "k2" else math.exp(-delta) - 1 + delta


def exp_clamped(x):
    return math.exp(max(-20.0, min(20.0, x)))


def clip(x, low, high):
    return max(low, min(high, x))


def reference(name, p, lp, frozen, gen, ref, adv, mask):
    """The loss as its paper writes it. `frozen` is lp where a formula stops the gradient; gen None: on-policy."""
    sequences = []  # per sequence, the terms of its trained tokens
    for i in range(len(lp)):
        on = [t for t in range(len(lp[i])) if mask[i][t] and (gen is None or math.isfinite(gen[i][t]))]
        old = frozen[i] if gen is None else gen[i]
        terms = []
        if name == "gspo" and on:
            s = exp_clamped(sum(lp[i][t] - old[t] for t in on) / len(on))
            a = sum(adv[i][t] for t in on) / len(on)
            shared = -min(s * a, clip(s, 1 - p["clip_low"], 1 + p["clip_high"]) * a)
        for t in on:
            r, r_frozen, a = exp_clamped(lp[i][t] - old[t]), exp_clamped(frozen[i][t] - old[t]), adv[i][t]
            if name == "simple_grpo":
                term = -math.exp(lp[i][t] - frozen[i][t]) * a
            elif name in ("grpo", "dr_grpo", "dapo"):
                term = -min(r * a, clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * a)
            elif name == "cispo":
                term = -clip(r_frozen, p["ratio_min"], p["ratio_max"]) * a * lp[i][t]
            elif name == "gspo":
                term = shared
            elif name == "sapo":
                tau = p["tau_pos"] if a > 0 else p["tau_neg"]
                term = -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a
            elif name == "reinforce":
                c = p["clip_ratio"]
                term = -(r_frozen if c is None else clip(r_frozen, 1 - c, 1 + c)) * a * lp[i][t]
            if p["beta"]:
                term += p["beta"] * k(p["kl_estimator"], lp[i][t] - ref[i][t])
            terms.append(term)
        sequences.append(terms)
    if name in ("dapo", "cispo", "reinforce"):
        return sum(map(sum, sequences)) / max(1, sum(map(len, sequences)))
    if name == "dr_grpo":
        return sum(map(sum, sequences)) / (len(lp) * MAX_LEN)
    means = [sum(terms) / len(terms) for terms in sequences if terms]
    return sum(means) / max(1, len(means))


def reference_gradient(name, p, lp, gen, ref, adv, mask, step=1e-6):
    frozen = [list(row) for row in lp]
    gradient = []
    for i, row in enumerate(lp):
        gradient.append([])
        for t, value in enumerate(row):
            row[t] = value + step
            up = reference(name, p, lp, frozen, gen, ref, adv, mask)
            row[t] = value - step
            down = reference(name, p, lp, frozen, gen, ref, adv, mask)
            row[t] = value
            gradient[i].append((up - down) / (2 * step))
    return gradient


PAPER = {
    "simple_grpo": {},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"ratio_min": 0.0, "ratio_max": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "reinforce": {"clip_ratio": None},
}
OTHER = [
    ("grpo", {"clip_low": 0.1, "clip_high": 0.5}),
    ("cispo", {"ratio_min": 0.7, "ratio_max": 1.2}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.09}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("reinforce", {"clip_ratio": 0.2}),
]
CASES = [(name, {}) for name in PAPER] + OTHER
KL = [{"beta": 0.0, "kl_estimator": "k3"}, {"beta": 0.1, "kl_estimator": "k3"}, {"beta": 0.3, "kl_estimator": "k2"}]


def batch(seed, *, spread, with_holes=True, per_token=False):
    """B = 5, R = 7; one sequence fully masked, holes in the mask, one generator log-probability missing."""
    rng = random.Random(seed)
    rows, columns = 5, 7
    table = lambda f: [[f() for _ in range(columns)] for _ in range(rows)]  # noqa: E731
    lp = table(lambda: -rng.expovariate(1.0))
    gen = [[x + rng.gauss(0, spread) for x in row] for row in lp]
    ref = [[x + rng.gauss(0, 0.5) for x in row] for row in lp]
    adv = table(lambda: rng.gauss(0, 1)) if per_token else [[a] * columns for a in (1.3, -0.7, 0.4, -2.0, 0.9)]
    mask = table(lambda: int(rng.random() < 0.7)) if with_holes else table(lambda: 1)
    mask[3] = [0] * columns
    gen[1][2] = float("nan")
    mask[1][2] = mask[1][3] = 1
    return lp, gen, ref, adv, mask


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_table_of_papers_names_every_loss():
    assert set(PAPER) == set(LOSSES)


@pytest.mark.parametrize("spread", [0.001, 0.4, 3.0])
@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize(("name", "changed"), CASES)
def test_value_and_gradient_equal_those_of_plain_loops(name, changed, kl, off_policy, spread):
    args = {**changed, **kl, **({"max_response_len": MAX_LEN} if name == "dr_grpo" else {})}
    loss_fn = build_loss({"name": name, "args": args})
    for seed in range(2):
        lp, gen, ref, adv, mask = batch(seed, spread=spread, per_token=seed == 1)
        logprobs = tensor(lp).requires_grad_()
        loss = loss_fn(
            logprobs=logprobs,
            advantages=tensor(adv),
            padding_mask=tensor(mask),
            ref_logprobs=tensor(ref),
            generator_logprobs=tensor(gen) if off_policy else None,
        )
        loss.backward()
        parameters = {**PAPER[name], **changed, **kl}
        used = gen if off_policy else None
        expected = reference(name, parameters, lp, lp, used, ref, adv, mask)
        assert loss.item() == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
        gradient = tensor(reference_gradient(name, parameters, lp, used, ref, adv, mask))
        torch.testing.assert_close(logprobs.grad, gradient, atol=TOLERANCE, rtol=TOLERANCE)


def custom_reference(lp, ref, adv, mask):
    """The formula of `CustomLoss` with its defaults."""
    on = [(i, t) for i in range(len(lp)) for t in range(len(lp[i])) if mask[i][t]]
    total = 0.0
    for i, t in on:
        delta, a = lp[i][t] - ref[i][t], adv[i][t]
        r = math.exp(delta)
        total += -min(r * a, clip(r, 0.8, 1.2) * a) + 0.1 * k("k3", delta)
    return total / len(on)


def test_the_custom_example_equals_plain_loops_in_value_and_gradient():
    lp, _, ref, adv, mask = batch(3, spread=0.4)
    logprobs = tensor(lp).requires_grad_()
    loss = CustomLoss()(logprobs, tensor(ref), tensor(adv)[:, :1], tensor(mask))
    assert loss.item() == pytest.approx(custom_reference(lp, ref, adv, mask), abs=1e-12)
    loss.backward()
    for i, t in [(i, t) for i in range(5) for t in range(7)]:
        up, down = ([list(row) for row in lp] for _ in range(2))
        up[i][t] += 1e-6
        down[i][t] -= 1e-6
        slope = (custom_reference(up, ref, adv, mask) - custom_reference(down, ref, adv, mask)) / 2e-6
        assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=TOLERANCE), (i, t)
