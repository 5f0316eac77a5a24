"""Start the ranks of a program on this node, watch over them, and say once what went wrong.

`spec` is what the user asked for, `slurm` reads the same from a SLURM step, `settings` is the environment the ranks
get, `agent` is the only file that knows torchrun, `processes` ends ranks, `verdict` turns what is left of a run into
one message and an exit status, `run` puts these together. `guard` runs as its own process beside the launcher.
"""

from bmburst.runtime.launch.run import launch
from bmburst.runtime.launch.spec import LaunchSpec

__all__ = ["LaunchSpec", "launch"]
