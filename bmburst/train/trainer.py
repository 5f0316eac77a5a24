"""The trainer: everything of a run put together, in the order in which it happens."""

import contextlib
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bmburst import data, hugging_face
from bmburst.errors import UserError
from bmburst.loss import count_valid, global_mean
from bmburst.mesh import Mesh
from bmburst.runtime import start
from bmburst.runtime.watchdog import beat
from bmburst.sequence import SequenceShard
from bmburst.train import checkpoint
from bmburst.train.config import STANDARD_LIBRARY, TrainConfig
from bmburst.train.evaluate import measure
from bmburst.train.host_memory import available_bytes, shortage, state_bytes
from bmburst.train.loading import Loader
from bmburst.train.local_batch import LocalBatch
from bmburst.train.lr import learning_rate
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics, memory_gib
from bmburst.train.plot import plot_losses
from bmburst.train.progress import Progress
from bmburst.train.sample import generate
from bmburst.train.token_losses import token_losses

SAMPLE_FILE = "sample.txt"
_PROMPT_TOKENS = 64


def run(config: TrainConfig) -> None:
    """Train as `config` says, in every rank of the job; `bmburst train` starts the ranks and calls this in each.

    Raises:
        UserError: Something that the configuration names cannot work.
    """
    trainer = Trainer(config)
    trainer.restore()
    trainer.train()


class Trainer:
    """One rank of a training run.

    Building it starts BMTrain, opens the text and makes model and optimizer; every rank must build it with the same
    configuration. `train` does the rest; `step` and `evaluate` can also be called one by one.

    Args:
        config: What to train; `output` is set.

    Attributes:
        mesh: The ranks.
        model: Of `bmburst.blocks`, sharded by ZeRO.
        optimizer: AdamW over this rank's shards.
        steps_done: Optimizer steps so far.

    Raises:
        UserError: The configuration does not fit the ranks, or the text cannot be read or does not fit the model.
    """

    def __init__(self, config: TrainConfig) -> None:
        if config.output is None:
            raise UserError("output is not set\nfix: give the run folder, TrainConfig(output=...)")
        self.config = config
        self.folder: Path = config.output
        self.runtime = start(seed=config.seed, tensor=config.parallel.tensor_parallel)
        config.validate(self.runtime.world_size)
        # These define BMTrain classes: BMTrain must have been started.
        import bmtrain as bmt

        from bmburst.attention.module import BurstAttention
        from bmburst.blocks.model import Llama
        from bmburst.optim import build_optimizer

        parallel = config.parallel
        self.mesh = Mesh.over_bmtrain(
            data=parallel.data_parallel, sequence=parallel.sequence_parallel, heads=parallel.head_parallel
        )
        if config.optimizer.offload:
            self._require_host_memory(bmt.config["local_size"])
        self.cut = SequenceShard.cut(
            config.sequence_length,
            layout=parallel.layout,
            size=self.mesh.shape.sequence,
            rank=self.mesh.sequence_rank,
            mask="causal",
        )
        self.corpus = self._open_corpus()
        self._held_out = self._sequences("held_out")
        self.batches = data.Batches(
            self._sequences("train"),
            batch_size=config.batch_size,
            seed=config.seed,
            data_rank=self.mesh.data_rank,
            data_parallel=self.mesh.shape.data,
        )
        self._loader = Loader(self.cut, self.runtime.device)
        attention = partial(
            BurstAttention,
            group=self.mesh.sequence,
            layout=parallel.layout,
            kernel=parallel.kernel,
            strategy=parallel.strategy,
            transport=parallel.transport,
            deterministic=parallel.deterministic,
        )
        self.model = Llama(
            config.model,
            attention=attention,
            dtype=getattr(torch, config.dtype),
            recompute=config.recompute,
            zero_level=parallel.zero_level,
            seed=config.seed,
            loss_chunk=config.loss_chunk_tokens,
        )
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self._manager = bmt.optim.OptimManager(loss_scale=None)
        self._manager.add_optimizer(self.optimizer)
        self.steps_done = 0
        self._is_first = True

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.runtime.rank == 0

    def restore(self) -> None:
        """Take up the newest complete checkpoint of the run folder, or the weights of `init_from`, as configured.

        Raises:
            UserError: There is none, it is damaged, or it is of another model or corpus.
        """
        if self.config.resume:
            newest = checkpoint.newest_complete(self.folder)
            if newest is None:
                raise UserError(f"{self.folder} has no complete checkpoint to resume\nfix: begin a new run")
            progress = checkpoint.load(newest, self.model, self.optimizer)
            self.batches.load_state_dict(progress.data)
            self.steps_done = progress.step
        elif self.config.init_from is not None:
            hugging_face.load(self.model, self.config.init_from)

    def train(self) -> None:
        """Train to the last step, with evaluations and checkpoints on the way, and leave the run folder complete."""
        config, total = self.config, self.config.steps
        with contextlib.ExitStack() as stack:
            if self.is_main:
                stack.enter_context(checkpoint.alone_in(self.folder))
            writer = stack.enter_context(MetricsWriter(self.folder, self.steps_done + 1)) if self.is_main else None
            bar = stack.enter_context(Progress(total, self.steps_done + 1)) if self.is_main else None
            while self.steps_done < total:
                metrics = self.step()
                if writer and bar:
                    writer.write(metrics)
                    bar.update(metrics)
                is_last = self.steps_done == total
                if is_last or _is_due(config.eval_every, self.steps_done):
                    held_out = self.evaluate()
                    if writer and bar:
                        writer.write_eval(held_out)
                        bar.update_eval(held_out)
                        plot_losses(self.folder)
                if is_last or _is_due(config.checkpoint_every, self.steps_done):
                    self.save()
            if config.sample_tokens:
                text = self.sample()
                if bar:
                    (self.folder / SAMPLE_FILE).write_text(text, encoding="utf-8")
                    bar.note(f"sample:\n{text}")
            if bar:
                bar.note(f"run folder: {self.folder}")

    def step(self) -> StepMetrics:
        """Do one optimizer step on the next batch, and return what it gave, the same on every rank."""
        started = time.perf_counter()
        # Shapes are compared between GPUs in this process's first step: every later one does the same.
        self.mesh.set_checks(self._is_first)
        self._is_first = False
        loss, tokens = self.backward(self.next_batch())
        rate, norm = self.update()
        seconds = time.perf_counter() - started
        return StepMetrics(
            step=self.steps_done,
            loss=loss,
            bits_per_byte=loss * tokens / math.log(2) / max(self.batches.text_bytes, 1),
            lr=rate,
            grad_norm=norm,
            tokens_per_second=tokens / seconds,
            seconds=seconds,
            memory_gib=memory_gib(),
        )

    def next_batch(self) -> LocalBatch:
        """Move on in the data by one step, and return this rank's part of it; the one after is read meanwhile.

        What is read ahead moves nothing: a checkpoint goes on from the last step that this returned.
        """
        is_last = self.steps_done + 1 >= self.config.steps
        batch = self._loader.load(self.batches.coming(), None if is_last else self.batches.coming(steps=1))
        next(self.batches)
        return batch

    def backward(self, batch: LocalBatch) -> tuple[float, int]:
        """Add the gradient of the mean loss of a step's labels, in microbatches.

        Args:
            batch: This rank's part of the sequences of its data rank.

        Returns:
            The mean loss in nats over all ranks' valid labels, and how many there are.
        """
        # Counted over all: the mean must not depend on how ranks and microbatches share the labels.
        (counted,) = self.mesh.world.all_reduce(count_valid(batch.labels)).wait()
        valid = counted // self.mesh.shape.tensor  # a tensor group's ranks have the same part
        mean = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for part in batch.micro_batches(self.config.micro_batch_size):
            objective = global_mean(token_losses(self.model, part), valid, self.mesh.shape.size)
            self._manager.backward(objective)
            mean += objective.detach()
        return self.mesh.sum(mean.item()) / self.mesh.shape.size, int(valid.item())

    def update(self) -> tuple[float, float]:
        """Clip, step and clear the gradient; return the learning rate and the gradient's norm before clipping.

        A gradient that is not finite changes nothing: it would spoil every weight and moment for good.
        """
        self.steps_done += 1
        rate = learning_rate(self.config.schedule, self.config.optimizer.lr, self.steps_done, self.config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        clip_norm = math.inf if self.config.optimizer.clip_norm is None else self.config.optimizer.clip_norm
        norm = float(self._manager.clip_grad_norm(self.optimizer.param_groups, clip_norm))
        if math.isfinite(norm):
            self._manager.step()
        self._manager.zero_grad()
        beat()
        return rate, norm

    def evaluate(self) -> EvalMetrics:
        """Measure the model on held-out text."""
        data_ranks = self.mesh.shape.data
        batches = data.evaluation_batches(
            self._held_out,
            batch_size=data_ranks,
            limit=self.config.eval_sequences,
            data_rank=self.mesh.data_rank,
            data_parallel=data_ranks,
        )
        measured = measure(self.model, self.mesh, self.cut, batches, self.runtime.device)
        return EvalMetrics(step=self.steps_done, **asdict(measured))

    def save(self) -> Path:
        """Write a checkpoint of this step into the run folder."""
        progress = checkpoint.Progress(
            step=self.steps_done, data=self.batches.state_dict(), tokenizer=self.corpus.tokenizer_name
        )
        return checkpoint.save(self.folder, self.model, self.optimizer, progress, keep=self.config.keep_checkpoints)

    def sample(self) -> str:
        """Return a prompt from held-out text and what the model makes of it."""
        tokenizer = data.load_tokenizer(self.corpus.tokenizer_name)
        first = (self._held_out.documents(0) or (_PROMPT_TOKENS,))[0]
        prompt = self._held_out[0][: min(first, _PROMPT_TOKENS)].tolist()
        ids = generate(
            self.model,
            self.mesh,
            prompt,
            self.config.sample_tokens,
            layout=self.config.parallel.layout,
            device=self.runtime.device,
            allowed=tokenizer.vocab_size,
            seed=self.config.seed,
        )
        return f"{tokenizer.decode(prompt)}|{tokenizer.decode(ids)}\n"

    def _require_host_memory(self, local_size: int) -> None:
        needed, available = state_bytes(self.config, self.runtime.world_size, local_size), available_bytes()
        # On all ranks, or the others would wait for those of a short host.
        if self.mesh.sum(float(available is not None and available < needed)):
            raise shortage(needed, available)

    def _open_corpus(self) -> data.TokenFile:
        """Open the text; the first rank of each host tokenizes it, the others wait."""
        import bmtrain as bmt

        source = None if self.config.data.source == STANDARD_LIBRARY else self.config.data.source
        cache = self.config.data.cache or self.folder.parent / "tokens"

        def opened() -> data.TokenFile:
            return data.open_corpus(
                source,
                self.config.data.tokenizer,
                cache,
                text_field=self.config.data.text_field,
                progress=self.is_main,
                on_skip=self._left_out,
            )

        if self.runtime.local_rank == 0:
            opened()
        bmt.synchronize()
        corpus = opened()
        corpus.require_vocab(self.config.model.vocab_size)
        return corpus

    def _left_out(self, file: str) -> None:
        if self.is_main:
            sys.stderr.write(f"left out: {file}\n")

    def _sequences(self, split: str) -> data.PackedSequences:
        return data.PackedSequences(
            self.corpus,
            split=split,
            sequence_length=self.config.sequence_length,
            held_out_fraction=self.config.data.held_out_fraction,
            pack=self.config.pack,
        )


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
