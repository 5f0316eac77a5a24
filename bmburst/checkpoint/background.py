"""Writes checkpoints while training goes on: `BackgroundSaves`.

A thread of each rank copies what is saved into host memory (`bmburst.checkpoint.staging`) during the next step, and
then writes it. The next update of the weights waits for the copy. Threads suffice, because copies, checksums and writes
release Python's lock: what holds it takes about 10 us a piece of a tensor, 20 ms for llama-3-8b on two ranks.
"""

import threading

import torch

from bmburst.checkpoint.files import warn
from bmburst.checkpoint.sharded_files import GatheredTensors, on_every_rank
from bmburst.checkpoint.staging import AbandonedError, Staging
from bmburst.checkpoint.training import Draft
from bmburst.comm.host_memory import host_shard
from bmburst.errors import RunError, UserError

_PATIENCE = 5.0  # seconds that an abandoned thread gets to end


class BackgroundSaves:
    """Saves of a run, at most one at a time. Every rank makes the same calls.

    As a context it waits for the last save at its end. After an error of one rank alone it does not wait: the
    incomplete checkpoint stays under a hidden name, which the next save removes. It gives the host memory back.

    Attributes:
        staging: The host memory; None: `start` returns when the checkpoint is written.
    """

    def __init__(self) -> None:
        self.staging: Staging | None = None
        self._save: _Save | None = None

    def prepare(self, draft: Draft, available: int | None) -> str:
        """Reserve host memory for saves, and return why there is none; empty if there is.

        Args:
            draft: A checkpoint with the tensors of all later ones.
            available: Free bytes of this host that may be used; None if unknown.
        """
        opened = Staging.open(draft.tensors, available)
        if isinstance(opened, str):
            return f"training waits while a checkpoint is written: {opened}"
        self.staging = opened
        return ""

    def start(self, draft: Draft) -> None:
        """Start to write a checkpoint, after the previous one. Without host memory, write it.

        Weights and optimizer state must not change until `copied` has returned.

        Raises:
            UserError: On all ranks, if a rank cannot write this or the previous one.
        """
        import bmtrain as bmt

        self.wait()
        if self.staging is not None:
            try:
                on_every_rank(self.staging.wait)
            except OSError as error:  # on all ranks
                self.staging = None
                if bmt.rank() == 0:
                    warn(f"training waits while a checkpoint is written: {error.strerror}")
        if self.staging is None:
            draft.write(GatheredTensors())
        else:
            self._save = _Save(self.staging, draft)

    def copied(self) -> None:
        """Wait until the weights may change; on a GPU, let the current stream wait."""
        if self._save is not None:
            self._save.wait_for_copy()

    @property
    def is_writing(self) -> bool:
        """Whether a started save was not waited for yet, by `wait` or `settle`; the same on all ranks."""
        return self._save is not None

    @property
    def has_ended(self) -> bool:
        """Whether the started save has ended on this rank."""
        return self._save is not None and self._save.has_ended

    def settle(self, *, ended: bool) -> None:
        """Raise the error, a UserError, of a save that has ended. It does not block.

        Args:
            ended: Whether `has_ended` was true on all ranks, so that all raise the error at the same step.
        """
        if self._save is not None and (ended or self._save.has_failed_alone):
            self.wait()

    def wait(self) -> None:
        """Wait until the started checkpoint is on disk under its name.

        Raises:
            UserError: On all ranks, if a rank cannot write.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def __enter__(self) -> "BackgroundSaves":
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, UserError) or (isinstance(error, RunError) and error.on_all_ranks):
            self.wait()
        elif self._save is not None:
            self._save.abandon()
        self.staging = None


class _Save:
    """One save: a thread of this rank, which works together with those of the other ranks."""

    def __init__(self, staging: Staging, draft: Draft) -> None:
        self._staging, self._draft = staging, draft
        self._copied = threading.Event()
        self._error: BaseException | None = None
        for tensor in draft.tensors:  # in this thread: a step that settles a shard at the same time would not wait
            if kept := host_shard(tensor.shard.storage):
                kept.settle()
        on_gpu = draft.tensors[0].shard.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, name="bmburst-checkpoint", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def has_failed_alone(self) -> bool:
        return self.has_ended and self._error is not None and not isinstance(self._error, UserError)

    def wait_for_copy(self) -> None:
        self._copied.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._staging.abandoned.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            self._copy()
            self._draft.write(self._staging.source(self._draft.tensors))
        except AbandonedError:
            pass
        except BaseException as error:  # `result` raises it
            self._error = error
        finally:
            self._copied.set()

    @torch.no_grad()
    def _copy(self) -> None:
        if self._stream is None:
            self._staging.copy(self._draft.tensors)
        else:
            with torch.cuda.stream(self._stream):
                self._staging.copy(self._draft.tensors)
            self._copied.set()  # the copies are enqueued
            self._stream.synchronize()
        self._copied.set()
