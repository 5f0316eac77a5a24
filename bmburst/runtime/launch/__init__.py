"""Start the ranks of a program on this node, watch over them, and report once what went wrong.

`spec` holds what the user asked for, or what a SLURM step says. `run` gives ranks their environment and waits for
their end, `agent` starts and ends them, `result` turns the result into one message and an exit status. `nodes`
connects the launchers of several nodes through `relay`. `guard` is a process of its own beside the launcher.
"""

from bmburst.runtime.launch.run import launch
from bmburst.runtime.launch.spec import LaunchSpec

__all__ = ["LaunchSpec", "launch"]
