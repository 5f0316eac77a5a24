"""The trainer: builds model, data and optimizer of one rank, and runs training steps, evaluations and checkpoints."""

import contextlib
import math
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bmburst import data
from bmburst.amounts import GIB
from bmburst.checkpoint import hugging_face
from bmburst.checkpoint import training as checkpoint
from bmburst.checkpoint.adapter import Base
from bmburst.comm import gather_objects
from bmburst.comm.host_memory import HostMemory
from bmburst.comm.waits import traced
from bmburst.errors import UserError
from bmburst.inference.answering import generate
from bmburst.mesh import Mesh
from bmburst.outputs import TRAINING_LOCK, held
from bmburst.plan.counts import causal_pairs
from bmburst.runtime import start
from bmburst.runtime.watchdog import beat
from bmburst.train.clock import LagWatch, StepClock, Timeline, flops_meter, measure_waits
from bmburst.train.config import TrainConfig, profiled_steps
from bmburst.train.loading import Loader, LocalBatch, causal_cut
from bmburst.train.machine import require_dtype
from bmburst.train.memory_plan import expected_memory, explained, offloaded_pieces, recompute_for
from bmburst.train.metrics import EvalMetrics, StepMetrics, forget_peak, peak_bytes
from bmburst.train.objective import make_objective
from bmburst.train.report import RunReport
from bmburst.train.resolve import write_run_config
from bmburst.train.step import (
    HostFacts,
    LossScale,
    SkippedSteps,
    StepFacts,
    StopRequest,
    exchange,
    learning_rate,
    stopped_by,
)
from bmburst.train.text import kept_by_rank_0, open_text, sequences_of

SAMPLE_FILE = "sample.txt"
_PROMPT_TOKENS = 64


def run(config: TrainConfig) -> str:
    """Train according to `config`. Every rank of the job calls it; `bmburst train` starts the ranks.

    Returns:
        Why the run was stopped before its last step; empty if it was not.

    Raises:
        UserError: The configuration is not possible.
        RunError: Out of memory, or too many steps in a row were skipped.
    """
    with explained(config):
        trainer = Trainer(config)
    with explained(trainer.config):
        trainer.restore()
        return trainer.train()


class Trainer:
    """One rank of a training run.

    The constructor starts BMTrain, opens the data and creates model and optimizer; every rank must call it with the
    same configuration. `train` runs the whole training. `step` and `evaluate` can also be called one by one, and so can
    the parts of a step: `next_batch`, `backward` (several times to accumulate gradients), `update`.

    Args:
        config: The run; `output` must be set.

    Attributes:
        config: The same, with "auto" replaced by the chosen recompute policy.
        mesh: The ranks.
        model: A `bmburst.blocks.model.Llama`, sharded by ZeRO.
        optimizer: AdamW over this rank's shards.
        steps_done: Number of optimizer steps so far.

    Raises:
        UserError: The configuration does not fit the ranks, or the data cannot be read or do not fit the model.
    """

    def __init__(self, config: TrainConfig) -> None:
        if config.output is None:
            raise UserError("output is not set\nfix: give the path of the run folder, TrainConfig(output=...)")
        self.config = self._asked = config
        self.folder: Path = config.output
        self.runtime = start(seed=config.seed, tensor=config.parallel.tensor_parallel)
        config.validate(self.runtime.world_size)
        require_dtype(config.dtype, self.runtime.device)
        # Import after `start`: these modules import BMTrain.
        import bmtrain as bmt

        from bmburst.attention.module import BurstAttention
        from bmburst.blocks.model import Llama
        from bmburst.blocks.transformer import compile_ahead
        from bmburst.optim import build_optimizer

        parallel = config.parallel
        self.mesh = Mesh.over_bmtrain(
            data=parallel.data_parallel, sequence=parallel.sequence_parallel, heads=parallel.head_parallel
        )
        recompute = recompute_for(config, self.mesh, bmt.config["local_size"])  # checks memory before reading the data
        attention = partial(
            BurstAttention,
            group=self.mesh.sequence,
            layout=parallel.layout,
            kernel=parallel.kernel,
            strategy=parallel.strategy,
            transport=parallel.transport,
            deterministic=parallel.deterministic,
        )
        dtype = getattr(torch, config.dtype)
        self.config, self._host_memory = config.replace(recompute=recompute), HostMemory()
        if not self.runtime.on_host:  # both are slow, so start them first
            self._host_memory.prepare(offloaded_pieces(self.config, self.runtime.world_size))
            compiling = compile_ahead(config.model, dtype, attention(), packed=config.pack == "documents")
        self.cut = causal_cut(self.mesh, config.sequence_length, parallel.layout)
        self.corpus = open_text(config, self.folder, self.runtime)
        self._tokenizer = kept_by_rank_0(self.corpus, config, self.runtime)
        self._held_out = sequences_of(self.corpus, config, "held_out")
        trained = sequences_of(self.corpus, config, "train")
        self._counts = len(trained), len(self._held_out)
        self.batches = data.Batches(
            trained,
            batch_size=config.batch_size,
            seed=config.seed,
            data_rank=self.mesh.data_rank,
            data_parallel=self.mesh.shape.data,
        )
        self._loader = Loader(self.cut, self.runtime.device)
        self._per_host = bmt.config["local_size"]
        make_model = partial(
            Llama,
            config.model,
            attention=attention,
            dtype=dtype,
            zero_level=parallel.zero_level,
            loss_chunk=config.loss_chunk_tokens,
            mlp_chunk=config.mlp_chunk_tokens,
            offload_weights=config.optimizer.offload_weights,
            host_memory=self._host_memory,
        )
        self.model = make_model(recompute=recompute, seed=config.seed, lora=config.lora if config.lora.is_on else None)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self._objective = make_objective(config, self.model, make_model, self.mesh, self.cut, self.runtime.device)
        self._manager = bmt.optim.OptimManager(loss_scale=None)  # no overflow check: `exchange` finds overflows
        self._manager.add_optimizer(self.optimizer)
        self._loss_scale = LossScale.of(config)
        self._base: Base | None = None
        self.steps_done = 0
        self._is_first = True
        self._clock = StepClock(on_gpu=not self.runtime.on_host)
        measure_waits(self._clock.meter, self.mesh, on_host=self.runtime.on_host)
        self._hosts = gather_objects(self.mesh.world, socket.gethostname()[:200])
        self._lag, self._stop = LagWatch(self._hosts), StopRequest()
        self._skips = SkippedSteps(self._hosts, min(config.max_skipped_steps, config.steps))
        device = None if self.runtime.on_host else torch.cuda.get_device_name()
        self._flops, self._no_peak = flops_meter(self.config, self.runtime.world_size, device)
        if not self.runtime.on_host:
            compiling.join()  # its allocations must not happen during the capture of a CUDA graph

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.runtime.rank == 0

    def restore(self) -> None:
        """Load the newest complete checkpoint of the run folder, or the weights of `init_from`, as configured.

        Raises:
            UserError: `resume` is true and there is no checkpoint, or all are damaged, or it has another model or
                corpus.
        """
        base, newest = self.config.init_from, self.folder
        if self.config.resume:
            newest = checkpoint.verified_together(self.folder)
        is_resumed = newest != self.folder
        if self.config.resume is True and not is_resumed:
            raise UserError(
                f"{self.folder} has no complete checkpoint to resume from\nfix: start a new run without --resume"
            )
        if base is not None and (self.config.lora.is_on or not is_resumed):
            base = checkpoint.verified_together(base)
            hugging_face.load(self.model, base)
            if self.config.lora.is_on:
                self._base = Base.open(base, self.config.model)
        if is_resumed:
            progress = checkpoint.load(newest, self.model, self.optimizer, base=self._base)
            self.batches.load_state_dict(progress.data)
            self.steps_done, self._skips.total = progress.step, progress.skipped
            self._loss_scale.restore(progress.loss_scale)

    def train(self) -> str:
        """Train up to the last step, with evaluations and checkpoints, and write the results to the run folder.

        Returns:
            Why the run was stopped before its last step; empty if it was not.
        """
        config, total, every = self.config, self.config.steps, self.config.checkpoint_every
        with self._stop.listening(), contextlib.ExitStack() as stack:
            if self.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self.folder, TRAINING_LOCK))
            first = self.steps_done + 1
            report = stack.enter_context(RunReport(config, first, is_main=self.is_main))
            if self.is_main:
                memory = expected_memory(self.config, self.runtime.world_size, self._per_host)
                report.begin(self.mesh.shape, self._counts, self.corpus.tokenizer_name, memory)
            report.note(self._no_peak)
            steps, on_gpu = profiled_steps(config.profile), not self.runtime.on_host
            timeline = Timeline(steps, self.folder, self.runtime.rank, on_gpu=on_gpu)
            stack.callback(timeline.close)
            stopped = ""
            self.optimizer.prepare(after=self._host_memory.wait)
            while self.steps_done < total and not stopped:
                with timeline.step(self.steps_done + 1):
                    metrics, facts = self._take_step()
                if self.is_main and self.steps_done == first:  # the configuration works; --resume reads it
                    write_run_config(self._asked, self.folder)
                stopped = stopped_by(facts, self._hosts, saves=every is not None)
                report.step(metrics)
                report.note(self._skips.message)
                report.note(self._lag.add(facts.hosts) or "")
                self._skips.require(has_checkpoint=lambda: checkpoint.newest_complete(self.folder) is not None)
                is_last = self.steps_done == total
                if stopped and every is not None:  # before an evaluation, because there may be little time left
                    self.save()
                if is_last or _is_due(config.eval_every, self.steps_done):
                    with report.doing("measuring the loss of held-out text"):
                        report.held_out(self.evaluate())
                if not stopped and every is not None and (is_last or _is_due(every, self.steps_done)):
                    with report.doing("saving a checkpoint"):
                        self.save()
            report.close_bar()
            report.note(stopped)
            if config.sample_tokens and not stopped:
                report.note(f"a sample of {config.sample_tokens} tokens, after the held-out text before |:")
                text = self.sample(report.piece)
                report.piece("\n\n")
                if self.is_main:
                    (self.folder / SAMPLE_FILE).write_text(text, encoding="utf-8")
            report.finish()
        return stopped

    def step(self) -> StepMetrics:
        """Run one optimizer step on the next batch and return its metrics; times are those of this rank."""
        metrics, _ = self._take_step()
        return metrics

    def _take_step(self) -> tuple[StepMetrics, StepFacts]:
        """Run one optimizer step, and return its metrics and its facts, which are the same on all ranks."""
        started = time.perf_counter()
        # Compare shapes between ranks only in the first step: later steps make the same calls.
        self.mesh.set_checks(self._is_first)
        self._is_first = False
        with self._clock.data(), traced("data"):
            batch = self.next_batch()
        facts = self.backward(batch)
        rate = self.update(facts)
        seconds = time.perf_counter() - started
        return self._metrics(facts, rate, seconds), facts

    def _metrics(self, facts: StepFacts, rate: float, seconds: float) -> StepMetrics:
        """Return the metrics of the step just finished; `rate`: its learning rate, `seconds`: its time on this rank."""
        ranks, trained = self.runtime.world_size, self.config.batch_size * self.config.sequence_length
        used = self._flops.of(trained, facts.query_key_pairs / (ranks // self.mesh.shape.data), seconds)
        bits = facts.loss * facts.tokens / math.log(2)
        margin, accuracy = facts.rewards or (None, None)
        return StepMetrics(
            step=facts.step,
            loss=facts.loss,
            bits_per_byte=None if facts.rewards else bits / max(self.batches.text_bytes, 1),
            lr=rate,
            grad_norm=facts.grad_norm,
            tokens_per_second=facts.tokens / seconds,
            seconds=seconds,
            memory_gib=max(host.memory for host in facts.hosts) / GIB,
            tokens_per_second_per_gpu=facts.tokens / seconds / ranks,
            mfu=used.mfu,
            mfu_kernel=used.mfu_kernel,
            hardware_tflops=used.tflops,
            exposed_seconds=self._clock.last.waits,
            data_seconds=self._clock.last.data,
            reserved_gib=max(host.reserved for host in facts.hosts) / GIB or None,
            skipped_steps=self._skips.total,
            loss_scale=self._manager.loss_scale if self._loss_scale.is_dynamic else None,
            reward_margin=margin,
            reward_accuracy=accuracy,
        )

    def next_batch(self) -> LocalBatch:
        """Return this rank's part of the next batch, and prefetch the batch after it in the background.

        Prefetching does not change the position in the data: a checkpoint continues after the last returned batch.
        """
        is_last = self.steps_done + 1 >= self.config.steps
        batch = self._loader.load(self.batches.coming(), None if is_last else self.batches.coming(steps=1))
        next(self.batches)
        return batch

    def backward(self, batch: LocalBatch) -> StepFacts:
        """Accumulate the gradient of the mean loss over micro-batches, and exchange the facts of the step.

        Args:
            batch: This rank's part of the sequences of its data rank.

        Returns:
            The facts of the step for `update`, equal on all ranks: `loss`, the mean in nats over all valid labels;
            `tokens`, their number; `grad_norm`, the norm of the gradient accumulated since the last `update`.
        """
        objective = self._objective.begin(batch)
        self._manager.loss_scale = self._loss_scale.value
        with self._clock.work():
            for part in batch.micro_batches(self.config.micro_batch_size):
                with traced("forward"):
                    result = objective.forward(part)
                with traced("backward"):
                    self._manager.backward(result)
        memory, reserved = peak_bytes()
        forget_peak()
        known = HostFacts(
            query_key_pairs=sum(causal_pairs(texts, self.config.model.sliding_window) for texts in batch.texts),
            memory=memory,
            reserved=reserved,
            stop=self._stop.signum,
            **asdict(self._clock.last),
        )
        square = self.optimizer.square_sum(self.runtime.device) / self._manager.loss_scale**2
        sums = objective.share, square, objective.tokens
        return exchange(self.mesh.world, self.steps_done + 1, *sums, known, objective.rewards)

    def update(self, facts: StepFacts) -> float:
        """Clip the gradient, run the optimizer and clear the gradient; return the learning rate.

        The gradient must be the one that `backward` accumulated, unchanged, because its norm is taken from `facts`. If
        loss or gradient are not finite, the optimizer is skipped: weights and moments would stay NaN or infinite.

        Args:
            facts: Result of the last `backward`.

        Raises:
            UserError: The facts belong to another step, so there is no gradient.
        """
        if facts.step != self.steps_done + 1:
            raise UserError(
                f"update() got the gradient of step {facts.step}, but {self.steps_done} steps are done\n"
                "fix: call backward(batch) before each update, and pass what it returned"
            )
        self.steps_done = facts.step
        rate = learning_rate(self.config.schedule, self.config.optimizer.lr, facts.step, self.config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._loss_scale.count(is_finite=facts.is_finite)  # for the next step; the manager has this step's scale
        self._skips.add(facts, self._loss_scale)
        with self._clock.optimizer(), traced("optimizer"):
            if facts.is_finite:
                self.optimizer.clip(facts.grad_norm, self.config.optimizer.clip_norm)
                self._manager.step()
            self._manager.zero_grad()
        self._clock.settle()
        beat()
        return rate

    def evaluate(self) -> EvalMetrics:
        """Measure the model on held-out text."""
        data_ranks = self.mesh.shape.data
        part = {"data_rank": self.mesh.data_rank, "data_parallel": data_ranks}
        limit = self.config.eval_sequences
        batches = data.evaluation_batches(self._held_out, batch_size=data_ranks, limit=limit, **part)
        return EvalMetrics(step=self.steps_done, **asdict(self._objective.measure(batches)))

    def save(self) -> Path:
        """Write a checkpoint of this step to the run folder and return its path."""
        progress = checkpoint.RunProgress(
            step=self.steps_done,
            data=self.batches.state_dict(),
            tokenizer=self.corpus.tokenizer_name,
            skipped=self._skips.total,
            loss_scale=self._loss_scale.state(),
        )
        keep = self.config.keep_checkpoints
        return checkpoint.save(
            self.folder, self.model, self.optimizer, progress, keep=keep, base=self._base, tokenizer=self._tokenizer
        )

    def sample(self, show: Callable[[str], object] = lambda _: None) -> str:
        """Return a prompt from held-out text and the model's continuation, separated by "|".

        Args:
            show: Called with each piece of text as soon as it is generated.
        """
        tokenizer, prompt = data.load_tokenizer(self.corpus.tokenizer_name), self._held_out.prompt(_PROMPT_TOKENS)
        show(f"{tokenizer.decode(prompt)}|")
        made = generate(self.model, self.mesh, prompt, self.config.sample_tokens, tokenizer, self.config.seed, show)
        return f"{tokenizer.decode(prompt)}|{tokenizer.decode(made)}\n"


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
