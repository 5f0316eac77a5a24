"""The trainer: builds model, data and optimizer of one rank, and runs training steps, evaluations and checkpoints."""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from bmburst import data
from bmburst.checkpoint.files import RunProgress
from bmburst.comm.host_memory import HostMemory
from bmburst.comm.waits import traced
from bmburst.data.mixture import MixedFiles
from bmburst.errors import UserError
from bmburst.inference.answering import generate
from bmburst.launch.beginning import Beginning
from bmburst.launch.start import start
from bmburst.launch.watchdog import beat
from bmburst.mesh import Mesh
from bmburst.outputs import TRAINING_LOCK, lock_folder
from bmburst.sequence import SequenceShard
from bmburst.train.clock import Timeline
from bmburst.train.config import TrainConfig, profiled_steps
from bmburst.train.context import LONG, measure_context
from bmburst.train.garbage import collect_after, held_back
from bmburst.train.kept import kept_by_rank_0
from bmburst.train.loading import Loader, LocalBatch, causal_cut, sample_cost
from bmburst.train.machine import require_dtype
from bmburst.train.memory_plan import (
    expected_memory,
    explained,
    offloaded_pieces,
    recompute_for,
    zero_group_for,
    zero_level_for,
)
from bmburst.train.metrics import EvalMetrics, StepMetrics
from bmburst.train.models import compile_kernels, model_maker, trained_model
from bmburst.train.monitor import StepMonitor
from bmburst.train.objective import make_objective
from bmburst.train.pipelined import run_stage
from bmburst.train.report import RunReport
from bmburst.train.saves import RunSaves
from bmburst.train.schedule import learning_rate
from bmburst.train.sections import HELD_OUT
from bmburst.train.step import StepFacts, exchange
from bmburst.train.text import RunText, sequences_of, sequences_of_epochs

SAMPLE_FILE = "sample.txt"
_PROMPT_TOKENS = 64
_LONG = 10.0  # seconds of a part of the beginning that is shown when it ends


def run(config: TrainConfig, beginning: Beginning | None = None, *, valid_for: int | None = None) -> str:
    """Train according to `config`. Every rank of the job calls it; `bmburst train` starts the ranks.

    Args:
        config: The run.
        beginning: What has taken time before this call; by default nothing has.
        valid_for: See `Trainer`.

    Returns:
        Why the run was stopped before its last step; empty if it was not.

    Raises:
        UserError: The configuration is not possible.
        RunError: Out of memory, or too many steps in a row were skipped.
    """
    with explained(config):
        trainer = Trainer(config, beginning, valid_for=valid_for)
    with explained(trainer.config):
        trainer.restore()
        return trainer.train()


class Trainer:
    """One rank of a training run.

    The constructor starts BMTrain, opens the data and creates model and optimizer; every rank must call it with the
    same configuration. With `resume` or weights to begin with, call `restore` next. `train` runs the whole training.
    `step` and `evaluate` can also be called one by one, and so can the parts of a step: `next_batch`, `backward`
    (several times to accumulate gradients), `update`.

    Args:
        config: The run; `output` must be set.
        beginning: What has taken time before this call; by default nothing has.
        valid_for: Number of ranks for which `config.validate` has been called, as `bmburst train` does once before the
            ranks work. By default, or if there are more or fewer ranks, the constructor calls it.

    Attributes:
        config: The same, with "auto" replaced by what was chosen, and "node" by the ranks of a node.
        runtime: This rank.
        mesh: The ranks.
        batches: The position in them.
        model: A `bmburst.blocks.model.Llama`, sharded by ZeRO.
        optimizer: AdamW over this rank's shards.
        saves: The checkpoints of the run.
        steps_done: Number of optimizer steps so far.

    Raises:
        UserError: The configuration does not fit the ranks, or the data cannot be read or do not fit the model.
    """

    def __init__(
        self, config: TrainConfig, beginning: Beginning | None = None, *, valid_for: int | None = None
    ) -> None:
        if config.output is None:
            raise UserError("output is not set\nfix: give the path of the run folder, TrainConfig(output=...)")
        self._beginning, asked = beginning or Beginning(), config
        parallel = config.parallel
        self.runtime = start(seed=config.seed, tensor=parallel.tensor_parallel, pipe=parallel.pipeline_parallel)
        if self.runtime.world_size != valid_for:
            config.validate(self.runtime.world_size)
        require_dtype(config.dtype, self.runtime.device)
        # Import after `start`: these modules import BMTrain.
        import bmtrain as bmt

        from bmburst.blocks.model import initialize
        from bmburst.optim.adamw import build_optimizer
        from bmburst.optim.norms import GradientNorms
        from bmburst.optim.sums import GradientSums
        from bmburst.zero_group import ZeroGroups

        self.mesh = Mesh.over_bmtrain(
            data=parallel.data_parallel, sequence=parallel.sequence_parallel, heads=parallel.head_parallel
        )
        here = self.mesh, bmt.config["local_size"]
        group = zero_group_for(config, *here)
        groups, config = ZeroGroups.of(self.mesh, group), config.with_parallel(zero_group=group)
        config = config.with_parallel(zero_level=zero_level_for(config, *here))
        self.config = config = config.replace(recompute=recompute_for(config, *here))  # checks memory before the data
        self._end("ranks")
        # Pinned memory and compiled kernels take long, so both begin before the data are read.
        memory, compiled = HostMemory(), compile_kernels(config, self.mesh, on_host=self.runtime.on_host)
        if not self.runtime.on_host:
            memory.prepare(offloaded_pieces(config, self.runtime.world_size))
        self._text = RunText.open(config, self.folder, self.runtime)
        tokenizer = kept_by_rank_0(self.corpus, config, self.runtime)
        sequences = sequences_of(self.corpus, config, "train")
        self.batches = data.Batches(
            sequences,
            batch_size=config.batch_size,
            seed=config.seed,
            data_rank=self.mesh.data_rank,
            data_parallel=self.mesh.shape.data,
            total=None if config.epochs is None else sequences_of_epochs(config, sequences),
            cost=sample_cost(sequences, config.model, config.recompute),
            micro_batch_size=config.micro_batch_size,
        )
        cut = causal_cut(self.mesh, config.sequence_length, parallel.layout)
        self._loader = Loader(cut, self.runtime.device, numbered=bool(config.lora.dropout))
        self._end("data")
        make_model = model_maker(config, self.mesh, memory, groups)
        self.model = trained_model(make_model, config, self.runtime.world_size, here[1])
        self._end("model")
        initialize(self.model, config.model, config.seed)
        self._end("initial weights")
        self.optimizer = build_optimizer(
            self.model, config.optimizer, outward_ratio=config.lora.loraplus_lr_ratio, seed=config.seed
        )
        self._norms, self._sums = GradientNorms(self.model), GradientSums(self.model, groups)
        self._objective = make_objective(config, self.model, make_model, self.mesh, cut, self.runtime.device)
        self._manager = bmt.optim.OptimManager(loss_scale=None)  # no overflow check: `exchange` finds overflows
        self._manager.add_optimizer(self.optimizer)
        self._monitor = StepMonitor(config, self.mesh, self.runtime)
        self.saves = RunSaves(config, self.model, self.optimizer, tokenizer, asked)
        self.steps_done = 0
        self._end("model")
        compiled()  # its allocations must not happen during the capture of a CUDA graph
        self._end("kernels")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.runtime.rank == 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.config.output is not None
        return self.config.output

    @property
    def corpus(self) -> data.TokenFile | MixedFiles:
        """The tokens of the training data."""
        return self._text.corpus

    @property
    def cut(self) -> SequenceShard:
        """This rank's shard of a sequence."""
        return self._loader.cut

    @property
    def progress(self) -> RunProgress:
        """The progress of the run, for a checkpoint."""
        return RunProgress(
            step=self.steps_done,
            data=self.batches.state_dict(),
            tokenizer=self.corpus.tokenizer_name,
            skipped=self._monitor.skips.total,
            loss_scale=self._monitor.scale.state(),
        )

    def restore(self) -> None:
        """Load the newest complete checkpoint of the run folder, or the weights of `init_from`, as configured.

        Raises:
            UserError: `resume` is true and there is no checkpoint, or all are damaged, or it has another model or
                corpus.
        """
        progress = self.saves.restore()
        if progress is not None:
            self.batches.load_state_dict(progress.data)
            self.steps_done, self._monitor.skips.total = progress.step, progress.skipped
            self._monitor.scale.restore(progress.loss_scale)
        self._end("weights")

    # A step, from the batch to the metrics

    def step(self) -> StepMetrics:
        """Run one optimizer step on the next batch and return its metrics; times are those of this rank."""
        started, monitor = time.perf_counter(), self._monitor
        # Compare shapes between ranks only in the first step: later steps make the same calls.
        self.mesh.set_checks(not monitor.has_begun)
        with monitor.clock.data(), traced("data"):
            batch = self.next_batch()
        facts = self.backward(batch)
        rate = self.update(facts)
        self.saves.settle(ended=monitor.saved)
        seconds = time.perf_counter() - started
        norms = dict(zip(self._norms.kinds, facts.grad_norms, strict=True))
        return monitor.metrics(facts, rate, seconds, norms, self._manager.loss_scale, self.batches)

    def next_batch(self) -> LocalBatch:
        """Return this rank's part of the next batch, and prefetch the batch after it in the background.

        Prefetching does not change the position in the data: a checkpoint continues after the last returned batch.
        """
        self.saves.require_restored()
        is_last = self.steps_done + 1 >= self.config.steps
        batch = self._loader.load(self.batches.coming(), None if is_last else self.batches.coming(steps=1))
        next(self.batches)
        return batch

    def backward(self, batch: LocalBatch) -> StepFacts:
        """Accumulate the gradient of the mean loss over micro-batches, and exchange the facts of the step.

        The exchange is the only wait of the host for the device in a step. The update depends on it: whether the step
        is skipped, and by how much the gradient is clipped.

        Args:
            batch: This rank's part of the sequences of its data rank.

        Returns:
            The facts of the step for `update`, equal on all ranks: `loss`, the mean in nats over all valid labels;
            `tokens`, their number; `grad_norm`, the norm of the gradient accumulated since the last `update`.
        """
        if self.config.lora.dropout:  # depends on the step alone, so that a resumed run goes on alike
            batch = replace(batch, dropout_seed=f"dropout {self.config.seed} {self.steps_done + 1}")
        objective = self._objective.begin(batch)
        self._manager.loss_scale = self._monitor.scale.value
        *parts, last = batch.micro_batches(self.config.micro_batch_size)
        with self._monitor.clock.work(), self.model.model.gather_memory.unchanged():
            if self.mesh.shape.pipe > 1:
                with self._sums.backward(is_last=True):
                    run_stage(
                        self.model,
                        (*parts, last),
                        lambda part, stream: self._manager.scale_loss(objective.forward(part, stream)),
                        gathers_once=self.config.parallel.zero_level == 2,
                    )
            else:
                for part in (*parts, last):
                    with traced("forward"):
                        result = objective.forward(part)
                    with traced("backward"), self._sums.backward(is_last=part is last):
                        self._manager.backward(result)
                    del result  # freeing its graph takes a millisecond, in which the GPU is still busy
        squares = self._norms.square_sums(self.runtime.device) / self._manager.loss_scale**2
        known = self._monitor.host_facts(batch, saved=self.saves.has_ended)
        sums = objective.share, squares, objective.tokens
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
            group["lr"] = rate * group["lr_factor"]
        self._monitor.judge(facts)  # sets the loss scale of the next step; the manager has this step's
        self.saves.copied()
        with self._monitor.clock.optimizer(), traced("optimizer"):
            if facts.is_finite:
                self.optimizer.clip(facts.grad_norm, self.config.optimizer.clip_norm)
                self._manager.step()
            self._sums.clear()
            self._manager.zero_grad()
        self._monitor.clock.settle()
        beat()
        return rate

    # A run

    def _end(self, part: str) -> None:
        """End a part of the beginning, and show it if it was long: the run may be stopped before its first step."""
        seconds = self._beginning.end(part)
        if self.is_main and seconds >= _LONG:
            sys.stderr.write(f"{part}: {seconds:.0f} s\n")

    def train(self) -> str:
        """Train up to the last step, with evaluations and checkpoints, and write the results to the run folder.

        Returns:
            Why the run was stopped before its last step; empty if it was not.
        """
        config, monitor, first = self.config, self._monitor, self.steps_done + 1
        self.saves.require_folder()
        self._require_steps()
        with contextlib.ExitStack() as stack:
            stack.enter_context(monitor.stop.listening())
            if self.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_folder(self.folder, TRAINING_LOCK))
            report = stack.enter_context(RunReport(config, first, is_main=self.is_main))
            self._introduce(report)
            on_gpu = not self.runtime.on_host
            timeline = Timeline(profiled_steps(config.profile), self.folder, self.runtime.rank, on_gpu=on_gpu)
            stack.callback(timeline.close)
            stack.enter_context(held_back())
            stack.enter_context(self.saves)  # waits for the last one
            self.optimizer.prepare(after=self.model.host_memory.wait)
            self._end("optimizer")
            while self.steps_done < config.steps and not monitor.stopped:
                with timeline.step(self.steps_done + 1):
                    metrics = self.step()
                report.step(metrics)
                for message in monitor.messages:
                    report.note(message)
                monitor.skips.require(has_checkpoint=self.saves.has_one)
                if self.steps_done == first:
                    self._after_first_step(report)
                self._evaluate_and_save(report)
                collect_after(self.steps_done)
            with report.doing("writing the checkpoint"):
                self.saves.wait()
            report.close_bar()
            report.note(monitor.stopped)
            if config.sampled and not monitor.stopped:
                self._show_sample(report)
            if self._wants_context and not monitor.stopped:
                self._show_context(report)
            report.finish()
        return monitor.stopped

    def evaluate(self, name: str | None = None) -> EvalMetrics:
        """Measure the model on held-out text or on a validation file.

        Args:
            name: "held_out", or the name of a validation file; None: the first of them.
        """
        self.saves.require_restored()
        name = next(iter(self._text.evaluated)) if name is None else name
        data_ranks = self.mesh.shape.data
        part = {"data_rank": self.mesh.data_rank, "data_parallel": data_ranks}
        limit = self.config.eval_sequences
        batches = data.evaluation_batches(self._text.evaluated[name], batch_size=data_ranks, limit=limit, **part)
        return EvalMetrics(step=self.steps_done, data=name, **asdict(self._objective.measure(batches)))

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of this step to the run folder and return its path.

        Args:
            wait: Whether to return when it is on disk. Otherwise, in `train`, it is written beside the next steps.

        Raises:
            UserError: On all ranks, if a rank cannot write.
        """
        return self.saves.save(self.progress, wait=wait)

    def sample(self, show: Callable[[str], object] = lambda _: None) -> str:
        """Return a prompt from held-out text and the model's continuation, separated by "|".

        Args:
            show: Called with each piece of text as soon as it is generated.
        """
        self.saves.require_restored()
        tokenizer, prompt = self._text.tokenizer(), self._text.first_evaluated.prompt(_PROMPT_TOKENS)
        show(f"{tokenizer.decode(prompt)}|")
        made = generate(self.model, self.mesh, prompt, self.config.sampled, tokenizer, self.config.seed, show)
        return f"{tokenizer.decode(prompt)}|{tokenizer.decode(made)}\n"

    def _require_steps(self) -> None:
        """Raise UserError unless the configured steps are those of the epochs."""
        if (total := self.batches.total) is None:
            return
        steps = self.steps_done + max(-(-(total - self.batches.samples) // self.config.batch_size), 0)
        if steps != self.config.steps:
            raise UserError(
                f"epochs {self.config.epochs:g} of {len(self.batches.sequences):,} sequences are {steps:,} steps, and "
                f"steps is {self.config.steps:,}\nallowed: steps {steps}\nfix: TrainConfig(epochs=..., steps={steps})"
            )

    def _introduce(self, report: RunReport) -> None:
        import bmtrain as bmt

        if self.is_main:
            memory = expected_memory(self.config, self.runtime.world_size, bmt.config["local_size"])
            totals = {name: len(each.evaluated()) for name, each in self._text.evaluated.items()}
            counts = len(self.batches.sequences), totals.get(HELD_OUT, 0)
            for text in self._text.reports(self.config):
                report.note(text)
            for name, total in totals.items():
                if total > self.config.eval_sequences:
                    most, what = self.config.eval_sequences, name.replace("_", "-")
                    report.note(f"evaluations take {most:,} of {total:,} sequences of {what}: --eval-sequences")
            report.begin(self.mesh.shape, counts, self.corpus.tokenizer_name, memory)
            if (groups := self._sums.groups).count > 1:
                report.note(f"ZeRO over {groups.ranks} ranks; {groups.count} groups sum their gradients once a step")
        report.note(self._monitor.no_peak)

    def _after_first_step(self, report: RunReport) -> None:
        """Say how the beginning was spent. Write the configuration, which works, for --resume.

        Reserve memory for saves, since the rest is in use now.
        """
        self._beginning.end("first step")
        report.began(self._beginning)
        if self.is_main:
            self.saves.write_config()
        report.note(self.saves.go_beside_training(self.progress))

    def _evaluate_and_save(self, report: RunReport) -> None:
        """Evaluate and save if the last step asks for it."""
        config, done, stopped = self.config, self.steps_done, bool(self._monitor.stopped)
        is_last, saves = done == config.steps, config.checkpoint_every is not None
        if stopped and saves:  # before an evaluation, because there may be little time left
            self._save(report)
        if is_last or _is_due(config.eval_every, done):
            for name in self._text.evaluated:
                with report.doing(f"measuring the loss of {name.replace('_', '-')} text"):
                    report.held_out(self.evaluate(name))
        if not stopped and saves and (is_last or _is_due(config.checkpoint_every, done)):
            self._save(report)

    def _save(self, report: RunReport) -> None:
        with report.doing("saving a checkpoint"):
            self.save(wait=bool(self._monitor.stopped))

    def _show_sample(self, report: RunReport) -> None:
        report.note(f"a sample of {self.config.sampled} tokens, after the held-out text before |:")
        text = self.sample(report.piece)
        report.piece("\n\n")
        if self.is_main:
            (self.folder / SAMPLE_FILE).write_text(text, encoding="utf-8")

    @property
    def _wants_context(self) -> bool:
        """Whether the run ends with the report on its context. Losses of pairs are not losses of tokens.

        A stage of a pipeline cannot generate the answers of pass keys; a configuration that asks for them is refused.
        """
        config = self.config
        asked = config.sequence_length >= LONG if config.context_report is None else config.context_report
        return asked and config.dpo.beta is None and config.parallel.pipeline_parallel == 1

    def _show_context(self, report: RunReport) -> None:
        found = measure_context(
            self.model,
            self.mesh,
            self.cut,
            self._text.first_evaluated,
            self._text.tokenizer(),
            device=self.runtime.device,
            limit=self.config.eval_sequences,
        )
        if self.is_main:
            found.write(self.folder)
        report.note(found.sentence())


def _is_due(interval: int | None, step: int) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
