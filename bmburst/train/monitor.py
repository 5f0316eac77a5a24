"""What a rank measures of its steps, and what all ranks conclude from the facts that they exchange: `StepMonitor`."""

import math
import socket
from collections.abc import Mapping
from dataclasses import asdict

import torch

from bmburst.amounts import GIB
from bmburst.comm.communicator import gather_objects
from bmburst.data.batches import Batches
from bmburst.launch.start import Runtime
from bmburst.memory import forget_peak, peak_bytes
from bmburst.mesh import Mesh
from bmburst.train.clock import FlopsMeter, LagWatch, StepClock, known_peak, measure_waits
from bmburst.train.config import TrainConfig
from bmburst.train.loading import LocalBatch
from bmburst.train.metrics import StepMetrics
from bmburst.train.step import HostFacts, LossScale, SkippedSteps, StepFacts, StopRequest, stopped_by


class StepMonitor:
    """Times, utilization, skipped steps, loss scale, slow ranks and requests to stop. Every rank has one.

    Args:
        config: The run, with a recompute policy.
        mesh: The ranks.
        runtime: This rank.

    Attributes:
        clock: Times the parts of a step.
        scale: Loss scale of the next step.
        skips: The skipped steps.
        stop: Whether this process was asked to stop.
        stopped: Why the run must stop after the last step; empty if it goes on.
        messages: Messages about the last step, the same on all ranks.
        saved: Whether a started save had ended on all ranks at the last step.
        has_begun: Whether a step was taken by this process.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, runtime: Runtime) -> None:
        self._config, self._shape = config, mesh.shape
        self._hosts = gather_objects(mesh.world, socket.gethostname()[:200])
        self._lag = LagWatch(self._hosts)
        device = None if runtime.on_host else torch.cuda.get_device_name()
        peak, self.no_peak = known_peak(device, config.dtype)
        self._flops = FlopsMeter(
            model=config.model,
            recompute=config.recompute,
            ranks=runtime.world_size,
            peak=peak,
            adapters=config.lora.parameters(config.model),
            trains_head=config.lora.trains_head,
            pairs=config.dpo.is_on,
        )
        self.clock = StepClock(on_gpu=not runtime.on_host)
        measure_waits(self.clock.meter, mesh, on_host=runtime.on_host)
        self.scale = LossScale.of(config)
        self.skips = SkippedSteps(self._hosts, min(config.max_skipped_steps, config.steps))
        self.stop = StopRequest()
        self.stopped = ""
        self.messages: tuple[str, ...] = ()
        self.saved = self.has_begun = False

    def host_facts(self, batch: LocalBatch, *, saved: bool) -> HostFacts:
        """Return the facts that this rank contributes to the exchange of a step."""
        memory, reserved = peak_bytes()
        forget_peak()
        return HostFacts(
            query_key_pairs=batch.query_key_pairs(self._config.model.sliding_window),
            memory=memory,
            reserved=reserved,
            stop=self.stop.signum,
            saved=saved,
            **asdict(self.clock.last),
        )

    def judge(self, facts: StepFacts) -> None:
        """Draw the conclusions from the facts of a step, for the next one."""
        self.scale.count(is_finite=facts.is_finite)
        self.skips.add(facts, self.scale)
        self.stopped = stopped_by(facts, self._hosts, saves=self._config.checkpoint_every is not None)
        self.messages = tuple(filter(None, (self.skips.message, self._lag.add(facts.hosts))))
        self.saved = all(host.saved for host in facts.hosts)
        self.has_begun = True

    def metrics(
        self,
        facts: StepFacts,
        rate: float,
        seconds: float,
        norms: Mapping[str, float],
        scale: float | None,
        batches: Batches,
    ) -> StepMetrics:
        """Return the metrics of a finished step.

        Args:
            facts: Facts of the step.
            rate: Its learning rate.
            seconds: Its time on this rank.
            norms: Norm of the gradient of each kind of parameter.
            scale: Its loss scale.
            batches: At its batch: the bytes of text of its labels, and how equal the costs of the data groups are.
        """
        shape, config = self._shape, self._config
        used = self._flops.of(
            config.batch_size * config.sequence_length, facts.query_key_pairs / (shape.size // shape.data), seconds
        )
        bits = facts.loss * facts.tokens / math.log(2)
        (margin, accuracy), balance = facts.rewards or (None, None), batches.balance
        return StepMetrics(
            step=facts.step,
            loss=facts.loss,
            bits_per_byte=None if facts.rewards else bits / max(batches.text_bytes, 1),
            lr=rate,
            grad_norm=facts.grad_norm,
            tokens_per_second=facts.tokens / seconds,
            seconds=seconds,
            memory_gib=max(host.memory for host in facts.hosts) / GIB,
            tokens_per_second_per_gpu=facts.tokens / seconds / shape.size,
            mfu=used.mfu,
            mfu_kernel=used.mfu_kernel,
            hardware_tflops=used.tflops,
            exposed_seconds=self.clock.last.waits,
            data_seconds=self.clock.last.data,
            reserved_gib=max(host.reserved for host in facts.hosts) / GIB or None,
            skipped_steps=self.skips.total,
            loss_scale=scale if self.scale.is_dynamic else None,
            reward_margin=margin,
            reward_accuracy=accuracy,
            grad_norms=norms,
            data_balance=None if balance is None else balance.dealt,
            data_balance_drawn=None if balance is None else balance.drawn,
        )
