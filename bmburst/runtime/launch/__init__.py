"""Starts the ranks of a program on this node, watches them, and reports an error once.

`spec` holds the options of a launch and reads a SLURM step. `run` sets the environment of the ranks and waits for them.
`agent` starts and ends the ranks. `result` turns their ends into one message and an exit status. `nodes` connects the
launchers of several nodes through `relay`. `guard` runs in a separate process and cleans up after a killed launcher.
"""

from bmburst.runtime.launch.run import launch
from bmburst.runtime.launch.spec import LaunchSpec

__all__ = ["LaunchSpec", "launch"]
