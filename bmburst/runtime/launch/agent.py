"""torchrun's elastic agent, in a thread of this process: it starts the ranks and gives them their environment.

In a thread because the agent would otherwise take this process's signals and, on Ctrl-C, wait half a minute for ranks
that are blocked in a collective. Here the main thread ends the ranks and the agent only sees that they are gone.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmburst.runtime.launch.nodes import JOIN_TIMEOUT, NodeWatch
from bmburst.runtime.launch.spec import LaunchSpec

RANK_SCRIPT = Path(__file__).parents[1] / "rank.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How a rank that failed ended.

    Attributes:
        rank: Its number in the run.
        local_rank: Its number on this node.
        status: Its exit status; -N when signal N ended it.
    """

    rank: int
    local_rank: int
    status: int


@dataclass(slots=True)
class Outcome:
    """What the agent's thread leaves behind: the failed ranks, or the error that kept ranks from starting."""

    failed: list[RankEnd] = field(default_factory=list)
    error: Exception | None = None


def rank_command(command: Sequence[str]) -> list[str]:
    """Return the command line of a rank."""
    return [sys.executable, str(RANK_SCRIPT), *command]


def torchrun_arguments(spec: LaunchSpec) -> list[str]:
    """Return the options with which torchrun's own command would start the same ranks."""
    host, port = spec.endpoint
    shared = [f"--nproc-per-node={spec.nproc}", f"--nnodes={spec.nnodes}", "--max-restarts=0"]
    if spec.nnodes == 1:
        return [*shared, "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", f"--local-addr={host}"]
    return [*shared, f"--node-rank={spec.node_rank}", f"--master-addr={host}", f"--master-port={port}"]


class AgentThread(threading.Thread):
    """Runs the ranks of this node to their end and keeps the `Outcome`.

    The kernel's "kill me when my parent dies" is tied to the thread that started the ranks, so this thread lives
    exactly as long as they do; the process's death ends it as well.

    Args:
        spec: How many ranks, where.
        command: What each rank runs.
        folder: The run's folder.
        nodes: This node's line to the others, if there are any: ranks start when it stands.
    """

    def __init__(self, spec: LaunchSpec, command: Sequence[str], folder: Path, nodes: NodeWatch | None) -> None:
        super().__init__(name="bmburst-agent", daemon=True)
        self.outcome = Outcome()
        self._spec, self._command, self._folder, self._nodes = spec, rank_command(command), folder, nodes

    def run(self) -> None:
        """Start the ranks and wait for them. Never raises."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import launch_agent

        _silence_torchrun()
        if self._nodes is not None:
            self._nodes.connected.wait()
            if self._nodes.error is not None:
                self.outcome.error = self._nodes.error
                return
        try:
            launch_agent(self._config(), self._command[0], self._command[1:])
        except ChildFailedError as error:
            self.outcome.failed = [
                RankEnd(rank=rank, local_rank=failure.local_rank, status=failure.exitcode)
                for rank, failure in sorted(error.failures.items())
            ]
        except Exception as error:  # the end of a thread: whatever it was, the main thread tells it
            self.outcome.error = error

    def _config(self) -> Any:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        spec, (host, port) = self._spec, self._spec.endpoint
        alone = spec.nnodes == 1
        return LaunchConfig(
            min_nodes=spec.nnodes,
            max_nodes=spec.nnodes,
            nproc_per_node=spec.nproc,
            run_id=spec.job,
            rdzv_backend="c10d" if alone else "static",
            rdzv_endpoint=f"{host}:{port}",
            rdzv_configs={"timeout": JOIN_TIMEOUT} | ({} if alone else {"rank": spec.node_rank}),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=host if alone else None,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
        )


def _silence_torchrun() -> None:
    """Keep the agent's log off the user's screen; the launcher says what happened. TORCHELASTIC_LOG=1 shows it."""
    if os.environ.get("TORCHELASTIC_LOG") == "1":
        return
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).disabled = True
