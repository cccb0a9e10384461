"""One step's gradient is that of the whole batch in one forward, however the batch is cut into rows and ranks."""

import inspect
import threading

import pytest
import torch
from torch import nn

from forge.losses import LOSSES, ImportanceCorrection, build_loss
from forge.objective import Objective, OneRank
from forge.packing import pack

VOCABULARY, WIDTH = 11, 6
SEQUENCES = 32


class OwnMean(nn.Module):
    """A user's loss that no sum over pieces can give: it divides by a mean over the whole batch."""

    def forward(self, logprobs, advantages, padding_mask):
        mask = padding_mask.float()
        mean = (logprobs.exp() * mask).sum() / mask.sum()
        return -(logprobs * advantages * mask).sum() / mean / mask.sum()


class Bigrams(nn.Module):
    """The smallest language model: the next token depends on the last one."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64))
        self.output = nn.Parameter(torch.randn(WIDTH, VOCABULARY, generator=generator, dtype=torch.float64))

    def score(self, rows):
        return [self.row(row, False)[0].detach() for row in rows]

    def backward(self, rows, loss, *, want_entropy):
        found = []
        for row in rows:
            scored, entropy = self.row(row, want_entropy)
            loss(row, scored, entropy).backward()
            found.append((scored.detach(), entropy.detach()))
        return found

    def row(self, row, want_entropy):
        if row is None:
            return (self.embed[:1] @ self.output)[:, 0], (self.embed[:1] @ self.output)[:, 1]
        logp = (self.embed[row.tokens_T] @ self.output)[row.score_index_M].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(1, row.score_targets_M[:, None])[:, 0]
        return chosen, entropy if want_entropy else entropy.detach()


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, index, slots, barrier):
        self.index, self._slots, self._barrier = index, slots, barrier
        self.count = len(slots)

    def gather(self, values):
        self._slots[self.index] = values
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone

    def sum(self, values):
        return torch.stack(self.gather(values)).sum(0)

    def max(self, value):
        return max(self.gather(value))


def make_batch(seed=1):
    """32 sequences in 8 groups of a prompt each, with lengths from 1 to 20, holes, and one left untrained."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 21, (SEQUENCES,), generator=g)
    prompts = torch.randint(0, VOCABULARY, (8, 3), generator=g).repeat_interleave(4, 0)
    response = torch.randint(0, VOCABULARY, (SEQUENCES, 20), generator=g)
    mask = torch.arange(20)[None] < lengths[:, None]
    mask[3, 0], mask[5] = False, False
    generator_logprobs = -torch.rand(SEQUENCES, 20, generator=g, dtype=torch.float64) * 4
    generator_logprobs[7, 0] = float("nan")
    targets = {
        "response": response,
        "padding_mask": mask,
        "advantages": torch.randn(SEQUENCES, 1, generator=g, dtype=torch.float64),
        "generator_logprobs": generator_logprobs,
        "ref_logprobs": -torch.rand(SEQUENCES, 20, generator=g, dtype=torch.float64) * 4,
    }
    return {"tokens": torch.cat([prompts, response], 1)}, targets


def gradients(loss, pieces, *, max_tokens, share_prefixes=True):
    """Each piece is one rank's (inputs, targets). Returns loss, gradient summed over ranks, outcome of rank 0."""
    model = [Bigrams() for _ in pieces]
    slots, barrier = [None] * len(pieces), threading.Barrier(len(pieces), timeout=20)
    outcomes = [None] * len(pieces)

    def work(i):
        inputs, targets = pieces[i]
        rows = pack(inputs, targets, max_tokens=max_tokens, share_prefixes=share_prefixes)
        batch = {k: v for k, v in targets.items() if k != "response"}
        ranks = OneRank() if len(pieces) == 1 else ThreadRanks(i, slots, barrier)
        objective = Objective(loss, entropy_coef=0.05)
        outcomes[i] = objective.backward(batch, rows, model=model[i], ranks=ranks)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(pieces))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(outcomes), "a rank failed"
    assert len({o.loss for o in outcomes}) == 1
    summed = torch.cat([sum(m.embed.grad for m in model).flatten(), sum(m.output.grad for m in model).flatten()])
    return outcomes[0], summed


def plain(loss):
    """The same gradient without packing: the dense [B, R] batch through the model in one forward."""
    inputs, targets = make_batch()
    model = Bigrams()
    logp = (model.embed[inputs["tokens"][:, 2:-1]] @ model.output).log_softmax(-1)
    logprobs = logp.gather(-1, targets["response"][..., None])[..., 0]
    mask = targets["padding_mask"] & targets["generator_logprobs"].isfinite()
    entropy = (-(logp.exp() * logp).sum(-1) * mask).sum() / mask.sum()
    wanted = inspect.signature(loss.forward).parameters
    tensors = {k: v for k, v in targets.items() if k in wanted} | {"padding_mask": mask}
    value = loss(logprobs=logprobs, **tensors) - 0.05 * entropy
    value.backward()
    return (
        float(value.detach()),
        float(entropy.detach()),
        torch.cat([model.embed.grad.flatten(), model.output.grad.flatten()]),
    )


def relative_error(value, expected):
    return float((value - expected).norm() / expected.norm())


def make_loss(name):
    if name == "own_mean":
        return OwnMean()
    args = {"max_response_len": 20} if name == "dr_grpo" else {}
    return build_loss({"name": name, "args": args}, defaults={"beta": 0.1})


@pytest.mark.parametrize("name", [*LOSSES, "own_mean"])
def test_rows_and_ranks_do_not_change_the_gradient(name):
    value, entropy, expected = plain(make_loss(name))
    inputs, targets = make_batch()
    first, second = [
        ({k: v[s] for k, v in inputs.items()}, {k: v[s] for k, v in targets.items()})
        for s in (slice(0, 20), slice(20, None))
    ]
    cuts = {
        "1 row": ([(inputs, targets)], 10_000),
        "some rows": ([(inputs, targets)], 80),
        "a row each": ([(inputs, targets)], 1),
        "2 ranks, 1 row": ([first, second], 10_000),
        "2 ranks, rows": ([first, second], 60),
    }
    for cut, (pieces, max_tokens) in cuts.items():
        outcome, gradient = gradients(make_loss(name), pieces, max_tokens=max_tokens)
        assert relative_error(gradient, expected) < 1e-5, cut
        assert outcome.loss == pytest.approx(value, rel=1e-5), cut
        assert outcome.entropy == pytest.approx(entropy, rel=1e-5), cut


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_the_correction_weighs_each_token_the_same_however_the_batch_is_cut(mode):
    """SimpleGRPO's term is -A with the gradient of lp; corrected it is weighed by min(w, 2), or dropped above 2."""
    inputs, targets = make_batch()
    model, correction = Bigrams(), ImportanceCorrection(mode=mode, cap=2.0)
    logp = (model.embed[inputs["tokens"][:, 2:-1]] @ model.output).log_softmax(-1)
    logprobs = logp.gather(-1, targets["response"][..., None])[..., 0]
    mask = targets["padding_mask"] & targets["generator_logprobs"].isfinite()
    w = (logprobs.detach() - targets["generator_logprobs"]).exp()
    w = w.clamp(max=2.0) if mode == "truncate" else torch.where(w > 2.0, 0.0, w)
    w = torch.where(mask, w, 0.0)
    terms = -w * targets["advantages"] * logprobs
    lengths = mask.sum(1, keepdim=True)
    (terms / lengths.clamp(min=1)).sum().div((lengths > 0).sum()).backward()
    expected = torch.cat([model.embed.grad.flatten(), model.output.grad.flatten()])
    batch = {k: v for k, v in targets.items() if k != "response"}
    for max_tokens in (10_000, 80, 1):
        ours = Bigrams()
        rows = pack(inputs, targets, max_tokens=max_tokens)
        loss = build_loss({"name": "simple_grpo", "args": {"beta": 0.0}})
        Objective(loss, correction=correction).backward(batch, rows, model=ours, ranks=OneRank())
        gradient = torch.cat([ours.embed.grad.flatten(), ours.output.grad.flatten()])
        assert relative_error(gradient, expected) < 1e-5


def test_a_correction_of_a_loss_with_a_ratio_of_its_own_is_refused():
    with pytest.raises(ValueError, match="weigh each token twice"):
        Objective(make_loss("grpo"), correction=ImportanceCorrection())


def test_ranks_with_different_widths_and_a_rank_without_sequences():
    """Rank 0 has every sequence, rank 1 has none and another R: the result is that of one rank."""
    inputs, targets = make_batch()
    nothing = {"tokens": inputs["tokens"][:0, :5]}, {k: v[:0, :2] for k, v in targets.items()}
    for loss in (make_loss("dapo"), OwnMean()):
        _, _, expected = plain(loss)
        _, gradient = gradients(loss, [(inputs, targets), nothing], max_tokens=50)
        assert relative_error(gradient, expected) < 1e-5


def test_a_batch_without_trained_tokens_gives_zero_and_no_nan():
    _, targets = make_batch()
    targets["padding_mask"][:] = False
    model = Bigrams()
    batch = {k: v for k, v in targets.items() if k != "response"}
    outcome = Objective(make_loss("grpo"), entropy_coef=0.1).backward(batch, [], model=model, ranks=OneRank())
    assert (outcome.loss, outcome.entropy, outcome.trained_tokens) == (0.0, 0.0, 0)
    assert model.embed.grad is None


def test_metrics_count_tokens_without_a_generator_logprob():
    inputs, targets = make_batch()
    batch = {k: v for k, v in targets.items() if k != "response"}
    rows = pack(inputs, targets, max_tokens=10_000)
    outcome = Objective(make_loss("grpo")).backward(batch, rows, model=Bigrams(), ranks=OneRank())
    assert outcome.metrics["tokens/dropped"] == int(targets["padding_mask"][7, 0])
    assert outcome.trained_tokens == int(targets["padding_mask"].sum()) - outcome.metrics["tokens/dropped"]
