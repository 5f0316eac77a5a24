"""Stopping in order: SIGTERM or SIGUSR1 on any rank ends the run after the step that is under way, with a checkpoint.

The signal is only noted; with the facts of a step all ranks hear of it, so that they stop after the same one.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from bmburst.runtime.watchdog import polite
from bmburst.train.exchange import StepFacts


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        signum: By which signal; 0 for not.
    """

    def __init__(self) -> None:
        self.signum = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals in the block; outside the main thread, where Python allows no handlers, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with polite((signal.SIGTERM, signal.SIGUSR1), self._note):
            yield

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum


def stopped_by(facts: StepFacts, hosts: Sequence[str], step: int, *, saves: bool = True) -> str:
    """Return, alike on all ranks, who was asked to stop before a step's exchange; empty for nobody.

    Args:
        facts: Of the step.
        hosts: Name of each rank's host.
        step: Its number.
        saves: Whether the run writes checkpoints.
    """
    asked = [(rank, int(host.stop)) for rank, host in enumerate(facts.hosts) if host.stop]
    if not asked:
        return ""
    rank, signum = asked[0]
    end = (
        "the checkpoint is saved, and --resume goes on from it"
        if saves
        else "--checkpoint-every never: nothing is saved"
    )
    return f"stopped after step {step} by {signal.Signals(signum).name} on rank {rank} (host {hosts[rank]}); {end}"
