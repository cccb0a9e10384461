"""Trainer: one optimizer step on a batch, the weights it leads to, and its part of a checkpoint.

A plain class: built in a process of its own it is the whole trainer, built in W processes of one process group it is
one of W ranks. Every method is called on every rank.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.actors.host_memory import keep_freed_memory
from forge.actors.ranks import data_parallel_ranks, start_process_group
from forge.actors.scoring import Scorer
from forge.actors.trainer_state import BackgroundWriter, load_random_state, read_state, save_random_state
from forge.config import CorrectionConfig, GRPOTrainingConfig, LoRAConfig, ParallelismConfig, TrainingConfig
from forge.losses import AVAILABLE, ImportanceCorrection, build_loss
from forge.models.build import load_model
from forge.models.flops import peak_flops, training_flops
from forge.objective import Objective
from forge.packing import PackedRow, pack
from forge.service import ForgeActor
from forge.weights import WeightStore


class NonFiniteStep(RuntimeError):
    """The loss or the gradients of a step are NaN or infinite; the step was not applied."""


class OutOfMemory(RuntimeError):
    """The batch does not fit into the GPU's memory."""


class Trainer(ForgeActor):
    """Trains a TorchTitan model on padded batches.

    Args:
        model: a local Hugging Face folder or a hub id.
        training: learning rate, schedule, clipping, dtype and so on; of `GRPOTrainingConfig` the entropy bonus too.
        parallelism: how the model and the batch are spread over the ranks.
        lora: trains adapters beside the frozen weights; None trains the weights.
        loss: a config name, an import path, `{name, args}`, or a module.
        loss_defaults: constructor arguments that are passed where the loss names them (clip_low, clip_high, beta).
        correction: importance correction of a loss without a ratio of its own; None is off.
        temperature: the sampling temperature; the logits are divided by it.
        device: "cpu" or "cuda".
        weights: where `push_weights` publishes; None for a trainer without generators.
        weights_dtype: the generators' dtype, which the published weights have.
        shares_device: between two steps a generator uses the device; gradients and spare memory are given up then.

    Example:
        >>> trainer = Trainer(model="models/tiny", training=GRPOTrainingConfig(learning_rate=1e-3), loss="grpo")
        >>> loss = trainer.train_step(inputs, targets)
    """

    def __init__(
        self,
        *,
        model: str,
        training: TrainingConfig,
        parallelism: ParallelismConfig | None = None,
        lora: LoRAConfig | None = None,
        loss: str | dict[str, Any] | nn.Module = "grpo",
        loss_defaults: dict[str, Any] | None = None,
        correction: CorrectionConfig | None = None,
        temperature: float = 1.0,
        device: str = "cpu",
        weights: WeightStore | None = None,
        weights_dtype: str = "float32",
        shares_device: bool = False,
    ) -> None:
        self._training = training
        self._lora = lora
        self._base_model = model
        torch.manual_seed(training.seed)  # for a loss that draws random numbers
        random.seed(training.seed)
        self._device = start_process_group(device, training.dtype)
        if device == "cpu":
            keep_freed_memory()
        self._model = load_model(
            model,
            parallelism=parallelism or ParallelismConfig(),
            dtype=training.dtype,
            device=device,
            seq_len=training.seq_len,
            activation_checkpointing=training.activation_checkpointing,
            compile=training.compile,
            lora=lora,
            seed=training.seed,
        )
        self._ranks = data_parallel_ranks(self._model, self._device)
        self._scorer = Scorer(self._model, temperature=temperature, device=self._device)
        built = loss if isinstance(loss, nn.Module) else build_loss(loss, defaults=loss_defaults or {})
        self._objective = Objective(
            built.to(self._device),
            entropy_coef=training.entropy_coef if isinstance(training, GRPOTrainingConfig) else 0.0,
            correction=build_correction(correction),
        )
        self._parameters = [p for p in self._model.module.parameters() if p.requires_grad]
        self._peak_flops = peak_flops(self._device, self._model.dtype)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=training.learning_rate, weight_decay=training.weight_decay, fused=True
        )
        self._weights = weights
        self._weights_dtype = getattr(torch, weights_dtype)
        self._shares_device = shares_device
        self._outgoing: dict[str, Tensor] = {}
        self._changed: set[str] = set()  # of these, what is not yet published
        self._writer = BackgroundWriter()
        self._metrics: dict[str, float] = {}
        self.step = 0

    def train_step(self, inputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> float:
        """One optimizer step.

        Args:
            inputs: one dict for each data-parallel rank: `tokens` [B, P+R] and, for padded tokens, `attention_mask`.
            targets: likewise `response`, `padding_mask`, `ref_logprobs` [B, R], `advantages` [B, 1] or [B, R], and
                `generator_logprobs` [B, R] where there are any.

        Returns:
            the loss of the whole batch, the same on every rank.

        Raises:
            ValueError: as many dicts as data-parallel ranks are needed.
            NonFiniteStep: the loss or the gradients are NaN or infinite; the weights are as before.
            OutOfMemory: the GPU's memory is too small, with the knobs to turn.
        """
        started = time.perf_counter()
        self._check_ranks(inputs, targets)
        try:
            return self._step(inputs[self._ranks.index], targets[self._ranks.index], started)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                "the trainer ran out of GPU memory. Lower training.max_tokens_per_microbatch or training.seq_len, set "
                "training.activation_checkpointing: full, or spread the model over more processes "
                f"(services.trainer.procs with parallelism.data_parallel_shard_degree). {error}"
            ) from error

    def evaluate(self, inputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> dict[str, float]:
        """How well the weights as they are predict the trained tokens of a batch; nothing is learned.

        Args:
            inputs, targets: as for `train_step`.

        Returns:
            sums over the whole batch, which add up over batches: `tokens`, `nats` (of their −log p) and `right` (how
            many are the likeliest token).
        """
        self._check_ranks(inputs, targets)
        rows = [row.to(self._device) for row in self._pack(inputs[self._ranks.index], targets[self._ranks.index])]
        padded: list[PackedRow | None] = [*rows]
        padded += [None] * (int(self._ranks.max(len(rows))) - len(rows))
        self._model.module.eval()
        judged = self._scorer.judge(padded)
        self._model.module.train()
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for row, (logprobs, right) in zip(rows, judged, strict=False):
            pairs = row.score_pair_N  # documents that agree so far share a pair, and count each
            sums[0] += len(pairs)
            sums[1] -= logprobs[pairs].double().sum()
            sums[2] += right[pairs].double().sum()
        return dict(zip(("tokens", "nats", "right"), self._ranks.sum(sums).tolist(), strict=True))

    def _check_ranks(self, inputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        if len(inputs) != self._ranks.count or len(targets) != self._ranks.count:
            raise ValueError(
                f"a batch is one dict for each of the {self._ranks.count} data-parallel ranks, "
                f"got {len(inputs)} inputs and {len(targets)} targets."
            )

    def _pack(self, mine: dict[str, Tensor], batch: dict[str, Tensor]) -> list[PackedRow]:
        if self._training.packing:
            return pack(mine, batch, max_tokens=self._tokens_per_row(), keep_last=False)
        # What is longer than a row gets one of its own.
        return pack(mine, batch, max_tokens=1, share_prefixes=False, keep_last=False)

    def _step(self, mine: dict[str, Tensor], batch: dict[str, Tensor], started: float) -> float:
        packed = self._pack(mine, batch)
        rows = [row.to(self._device) for row in packed]
        self._optimizer.zero_grad(set_to_none=True)
        if self._lora is not None and self._lora.dropout:
            # Drawn from the step alone, so that a resumed run drops what the uninterrupted one does.
            torch.manual_seed((self._training.seed * 1_000_003 + self.step) * 1_009 + self._ranks.index)
        on_device = {k: v.to(self._device) for k, v in batch.items() if k in AVAILABLE}
        outcome = self._objective.backward(on_device, rows, model=self._scorer, ranks=self._ranks)
        norm = self._clip_gradients()
        if not (math.isfinite(outcome.loss) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            if self._shares_device:  # the generator wakes to sample other groups
                self._give_memory_up()
            raise NonFiniteStep(
                f"step {self.step + 1}: loss {outcome.loss}, gradient norm {norm}. The step was not applied. Try a "
                f"lower training.learning_rate (now {self._training.learning_rate:g}), clip gradients harder "
                f"(training.max_norm, now {self._training.max_norm}), or check the data: rollouts.jsonl has the batch."
            )
        rate = self._training.learning_rate * learning_rate_factor(self.step, self._training)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.step += 1
        if self._shares_device:
            self._give_memory_up()
        useful = training_flops(self._model.architecture, packed, weights_train=self._lora is None)
        mine_done = [sum(r.num_tokens for r in packed), useful]
        tokens, flops = self._ranks.sum(torch.tensor(mine_done, dtype=torch.float64, device=self._device)).tolist()
        seconds = time.perf_counter() - started
        self._metrics = {
            **outcome.metrics,
            "loss": outcome.loss,
            "entropy": outcome.entropy,
            "grad_norm": norm,
            "lr": rate,
            "tokens/trained": outcome.trained_tokens,
            "time/train": seconds,
            "throughput/train_tokens_per_s": tokens / seconds,
            "throughput/mfu": flops / seconds / (self._peak_flops * self._world_size),
        }
        return outcome.loss

    def metrics(self) -> dict[str, float]:
        """What the last step measured, under the names of metrics.jsonl."""
        return dict(self._metrics)

    def data_parallel_ranks(self) -> int:
        """How many dicts `train_step` takes."""
        return self._ranks.count

    def collect_weights(self) -> float:
        """Copies the weights as they are now, under Hugging Face names and in the generators' dtype, for a push.

        The next step may run while `push_weights` sends the copy. Returns the seconds it took.
        """
        started = time.perf_counter()
        keep, first = self._rank == 0, not self._outgoing
        if keep and first:
            # All at once: made one by one among the tensors that come and go, they would leave holes of those' sizes.
            shapes = self._model.weight_shapes()
            self._outgoing = {name: torch.empty(shape, dtype=self._weights_dtype) for name, shape in shapes.items()}
        for name, tensor in self._model.hf_tensors(self._weights_dtype):
            if keep and (first or not _equal(self._outgoing[name], tensor)):
                self._outgoing[name].copy_(tensor.detach())
                self._changed.add(name)
        return time.perf_counter() - started

    async def push_weights(self, version: int) -> float:
        """Publishes the collected copy as `version`; returns the seconds it took. What has not changed since the last
        push, such as frozen weights, is not sent again."""
        started = time.perf_counter()
        if self._rank == 0 and self._weights is not None:
            unchanged = self._outgoing.keys() - self._changed
            await self._weights.publish(version, self._outgoing.items(), unchanged=unchanged)
            self._changed.clear()
        return time.perf_counter() - started

    def save(self, folder: str) -> float:
        """Begins a checkpoint: weights and optimizer (`folder`/trainer, safetensors) and a Hugging Face folder
        (`folder`/hf). Returns, with the seconds it took, when everything is copied to main memory and the next step may
        run; `save_finished` returns when it is written. One at a time.

        With LoRA the adapters and their optimizer, a folder for peft (`folder`/adapter), and the merged model in
        `folder`/hf unless `lora.merge` is off.
        """
        started = time.perf_counter()
        path = Path(folder)
        (path / "trainer").mkdir(parents=True, exist_ok=True)
        dtype = self._model.dtype
        hf = {}
        for name, tensor in self._model.hf_tensors(dtype) if self._saves_hf else ():  # collective: every rank iterates
            if self._rank == 0:
                hf[name] = tensor.cpu()

        def write_hf() -> None:
            self._model.write_hf(path / "hf", hf.items(), dtype=dtype)

        save_random_state(path / "trainer" / f"random-{self._rank}.json")
        if self._rank == 0:
            (path / "trainer" / "trainer.json").write_text(json.dumps({"step": self.step}))
        if self._lora is not None:  # small enough to be written at once
            self._model.save_adapter(path / "adapter", base=self._base_model)
        self._writer.start(self._named_state(), path / "trainer", also=write_hf if hf else None)
        return time.perf_counter() - started

    async def save_finished(self) -> None:
        """Waits until what `save` began is written; raises what went wrong with it."""
        await self._writer.finished()

    def checkpoint_bytes(self) -> int:
        """About how many bytes `save` writes, all ranks together: weights and two moments of what is trained in
        float32, and the Hugging Face folder."""
        whole = self._model.architecture.num_parameters
        trained = whole if self._lora is None else sum(p.numel() for p in self._parameters)
        return 3 * 4 * trained + self._model.dtype.itemsize * (whole if self._saves_hf else 0)

    @property
    def _saves_hf(self) -> bool:
        return self._lora is None or self._lora.merge

    def load(self, folder: str) -> int:
        """Continues from what `save` wrote, under any parallel layout; returns the step."""
        path = Path(folder) / "trainer"
        self.step = int(json.loads((path / "trainer.json").read_text())["step"])
        for parameter in self._parameters if self.step else []:  # before the first step there are no moments
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=self._device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        read_state(self._named_state(), path)
        load_random_state(path / f"random-{self._rank}.json")
        return self.step

    async def shutdown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _named_state(self) -> dict[str, Tensor]:
        """Every tensor that a continued run needs, by a name that does not depend on the layout."""
        named = {}
        for name, parameter in self._model.trained_parameters():
            named[f"model.{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in self._optimizer.state.get(parameter, {}):
                    named[f"{moment}.{name}"] = self._optimizer.state[parameter][moment]
        return named

    def _give_memory_up(self) -> None:
        """Gradients, and what was freed: a generator is about to take the device."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _clip_gradients(self) -> float:
        from torchtitan.distributed.utils import clip_grad_norm_

        limit = self._training.max_norm or math.inf
        dims = self._model.parallel_dims
        stages = dims.get_mesh("pp") if dims.pp_enabled else None
        return float(clip_grad_norm_(self._parameters, limit, pp_mesh=stages))

    def _tokens_per_row(self) -> int:
        return self._training.max_tokens_per_microbatch or self._model.tokens_that_fit()


def build_correction(config: CorrectionConfig | None) -> ImportanceCorrection | None:
    """The config's `grpo.correction`."""
    if config is None:
        return None
    return ImportanceCorrection(level=config.level, mode=config.mode, cap=config.cap)


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of `training.learning_rate`.

    A linear rise over `warmup_steps`, then constant, or falling to 0 at `steps`: linearly, or along half a cosine.

    Example:
        warmup_steps 4 → 0.25, 0.5, 0.75, 1, and 1 from there when the schedule is constant
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(training.steps - training.warmup_steps, 1)
    if training.lr_schedule == "linear":
        return max(1.0 - done, 0.0)
    if training.lr_schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return 1.0


def _equal(buffer: Tensor, tensor: Tensor) -> bool:
    """Whether the buffer holds the tensor's values already; for one that was trained, a look at its beginning tells."""
    if not torch.equal(buffer.view(-1)[:64], tensor.detach().reshape(-1)[:64].cpu()):
        return False
    return torch.equal(buffer, tensor.detach().cpu())
