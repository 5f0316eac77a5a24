"""Faults of two nodes, each a network namespace: a link that is cut, a node that is killed, a link that is slow."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from benchmarks import netns
from benchmarks.faults.inject import LIMIT, Bench, Chain, Report
from benchmarks.faults.points import Fault
from benchmarks.faults.programs import Base, Program, Watch, base_of

_LINK = netns.Shape(nodes=2, places=1, fast=1000, slow=1000)
_SLOW_MBIT = 2.0


class Nodes(Chain):
    """Two nodes of one rank each, in namespaces: a link that is cut, a node that is killed, a link that is slow."""

    def __init__(self, bench: Bench, place: Path, report: Report, network: netns.Network) -> None:
        super().__init__(bench, place, report)
        self._network = network
        self._patience = max(10, round(3 * bench.base().timing.start))
        self._base = self._undisturbed()

    @property
    def base(self) -> Base:
        """An undisturbed run on this network."""
        return self._base

    def _undisturbed(self) -> Base:
        watch = Watch(self.run)
        program = self.start(fresh=True)
        timing = watch.measure(program)
        self.bench.require_success(program)
        self.bench.say(f"undisturbed run on two nodes: {timing.total:.1f} s")
        folder = self.place.with_name(f"{self.place.name}-base")
        return base_of(self.run.rename(folder), timing)

    def start(self, *, fresh: bool) -> Program:
        """Start a launcher on each node."""
        words = ["--", "-m", "bmburst", *self.bench.words(self.run, fresh=fresh)]
        meet = ["--nproc=1", "--nnodes=2", f"--master-addr={self._network.address(0)}", "--master-port=29500"]
        named = ["env", f"GLOO_SOCKET_IFNAME={netns.DEVICE}"]
        hang = f"--hang-timeout={self._patience}"
        return self.bench.program(
            *(
                ([*self._network.within(n), *named], ["launch", *meet, f"--node-rank={n}", hang, *words])
                for n in range(2)
            )
        )

    def inject(self, fault: Fault, program: Program) -> None:
        """Cut, kill or slow down a node."""
        what, node = fault.target.split()
        if what == "cut":
            self._network.set_link(int(node), up=False)
        elif what == "slow":
            self._network.set_rate(int(node), _SLOW_MBIT)
        else:
            launcher = program.launchers[int(node)].pid
            for pid in (launcher, *program.of_target(f"rank {node}")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def undo(self, fault: Fault) -> None:
        """Mend the link."""
        _, node = fault.target.split()
        self._network.set_link(int(node), up=True)
        self._network.set_rate(int(node), _LINK.slow)

    def limit(self, fault: Fault) -> float:
        """A lost node is missed after a minute at most, or by the hang's limit."""
        return 2 * LIMIT + self._patience if fault.target != "slow 1" else 4 * LIMIT

    def judge(self, fault: Fault, program: Program) -> list[str]:
        """A slow node changes nothing; a lost one ends the other, which says so."""
        statuses = program.statuses
        if fault.target == "slow 1":
            return [] if statuses == [0, 0] else [f"statuses {statuses}: {program.last_words}"]
        if statuses == [0, 0] or (0 not in statuses and "bmburst: " in program.said):
            return []
        return [f"statuses {statuses}: {program.last_words}"]


@contextlib.contextmanager
def nodes(bench: Bench, place: Path, report: Report) -> Iterator[Nodes]:
    """Bring up the network of two nodes, and the chain on it."""
    with netns.network(_LINK) as network:
        yield Nodes(bench, place, report, network)
