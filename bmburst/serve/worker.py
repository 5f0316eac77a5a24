"""Answers questions on all ranks, one at a time, and keeps the KV caches of the latest texts.

Rank 0 takes questions from its server and sends each to the other ranks. While there is none, it sends a sign of life,
so that a lost rank is noticed and no rank counts as hung. At every chunk of prefill and every token, rank 0 tells the
others whether to go on: a client may have left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import broadcast_object
from bmburst.data.tokenizer import TokenIds
from bmburst.errors import UserError
from bmburst.inference.answering import GrowingAnswer
from bmburst.inference.generator import Generator
from bmburst.inference.sampling import GenerationOptions
from bmburst.inference.session import Session
from bmburst.launch.watchdog import beat

STOPPING = "the server is stopping"
"""Reason of a `Failure` of questions that the end of the server leaves without an answer."""
_TICK = 0.5  # seconds between two signs of life


@dataclass(frozen=True, slots=True)
class Text:
    """A new piece of an answer's text."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of an answer.

    Attributes:
        finish: "length", "stop" or "eos", as in `Answer`.
        new: Tokens of the answer.
        cached: Tokens of the prompt that were not computed again.
    """

    finish: str
    new: int
    cached: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The model cannot answer; the reason."""

    reason: str


Event = Text | End | Failure


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """A question that waits for its answer.

    Attributes:
        prompt: Its token ids.
        options: Options of the answer. Prompt and `max_new_tokens` fit into a session.
        send: Called with each event, in the worker's thread.
        is_over: Set by the server when nobody waits for the answer any more.
    """

    prompt: TokenIds
    options: GenerationOptions
    send: Callable[[Event], object]
    is_over: bool = False


class _Stopped(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False, slots=True)
class _Text:
    """A session, with the tokens in it and the number of its last use."""

    session: Session
    tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int64))
    used: int = 0

    def common(self, prompt: TokenIds) -> int:
        """Return how many tokens at the start of a prompt are those of this text, without the prompt's last token."""
        most = min(len(self.tokens), len(prompt) - 1)
        different = np.flatnonzero(self.tokens[:most] != prompt[:most])
        return int(different[0]) if len(different) else most


class Worker:
    """Answers questions. Every rank has one and calls `run`.

    A prompt takes the session that holds the most of its first tokens, if these are at least half of the prompt or of
    the session's text, else the one that was not used for the longest time. So several conversations keep their caches.

    Args:
        generator: The model, on all ranks.
        control: A group of the same ranks for rank 0's orders, on CPUs.
        sessions: Number of texts whose cache is kept.
        max_tokens: Most tokens of each, prompt and answer.
    """

    def __init__(self, generator: Generator, control: CheckedCommunicator, sessions: int, max_tokens: int) -> None:
        self._control, self._tokenizer = control, generator.tokenizer
        self._texts = [_Text(generator.session(max_tokens)) for _ in range(sessions)]
        self._answers = 0

    def run(self, jobs: "SimpleQueue[Job] | None", stopped: Callable[[], bool] = lambda: False) -> None:
        """Answer questions until rank 0 is told to stop.

        Args:
            jobs: Rank 0's questions; None on other ranks.
            stopped: Returns on rank 0 whether to stop; asked at every token.
        """
        while True:
            job = None if jobs is None else _next(jobs, stopped)
            order: Any = ("stop" if stopped() else "wait") if job is None else (job.prompt, job.options)
            order = broadcast_object(self._control, order)
            beat()
            if order == "stop":
                return
            if order != "wait":
                prompt, options = order
                self._answer(prompt, options, job, stopped)

    def _answer(
        self, prompt: TokenIds, options: GenerationOptions, job: Job | None, stopped: Callable[[], bool]
    ) -> None:
        text = self._place(prompt)
        growing = GrowingAnswer(self._tokenizer, options)  # on every rank: all end at the same token

        def go_on(_: object = None) -> None:
            beat()
            if self._is_told(job is not None and (job.is_over or stopped())):
                raise _Stopped

        tell = (lambda _: None) if job is None else job.send
        try:
            cached = text.session.keep(text.common(prompt))
            text.session.prefill(prompt[cached:], go_on)
            for token in text.session.generate(options):
                if piece := growing.push(token):
                    tell(Text(piece))
                if growing.finish is not None:
                    tell(End(finish=growing.finish, new=len(growing.tokens), cached=cached))
                    break
                go_on()
        except _Stopped:
            tell(Failure(STOPPING if stopped() else "nobody waits for the answer"))
        except UserError as error:  # the same on every rank
            tell(Failure("; ".join(str(error).splitlines())))
        except Exception as error:  # ends the server, and the client is told before
            tell(Failure(f"the model has failed: {type(error).__name__}"))
            raise
        text.tokens = np.array(text.session.tokens, np.int64)

    def _place(self, prompt: TokenIds) -> _Text:
        self._answers += 1
        best = max(self._texts, key=lambda text: text.common(prompt))
        if 2 * best.common(prompt) < min(len(prompt), len(best.tokens)):
            best = min(self._texts, key=lambda text: text.used)
        best.used = self._answers
        return best

    def _is_told(self, stops: bool) -> bool:
        """Return on every rank whether rank 0 stops."""
        if self._control.size == 1:
            return stops
        mine = torch.tensor([int(stops) if self._control.rank == 0 else 0])
        (told,) = self._control.all_reduce(mine).wait()
        return bool(told.item())


def _next(jobs: "SimpleQueue[Job]", stopped: Callable[[], bool]) -> Job | None:
    """Return the next question that somebody waits for; None if there is none yet, or on the way to the end."""
    while not stopped():
        try:
            job = jobs.get(timeout=_TICK)
        except Empty:
            return None
        if not job.is_over:
            return job
    return None


def drain(jobs: "SimpleQueue[Any]") -> None:
    """Tell the questions that still wait that there will be no answer."""
    while True:
        try:
            jobs.get_nowait().send(Failure(STOPPING))
        except Empty:
            return
