"""`bmburst plan --calibrate`: measures this machine and writes a hardware file."""

import argparse
import sys
from pathlib import Path

from bmburst.errors import UserError
from bmburst.outputs import require_file, write_text


def calibrate_machine(args: argparse.Namespace) -> int:
    """Measure this machine and write the hardware file to `--output`, or print it. Returns 0.

    Raises:
        UserError: There are fewer GPUs than `--nproc`, or the output is another file.
    """
    if args.output is not None:
        require_file("--output", args.output, "a hardware file of bmburst plan --calibrate", _is_hardware)
    import torch

    from bmburst.plan.rates import calibrate

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = args.nproc if args.nproc is not None else max(1, gpus)
    if ranks < 1 or (gpus and ranks > gpus):
        allowed = f"1 to {gpus}" if gpus else "at least 1"
        raise UserError(f"--nproc {ranks}\nallowed: {allowed}\nfix: leave it out for {max(1, gpus)}")
    text = calibrate(args.hardware, ranks, lambda words: print(f"measuring: {words}", file=sys.stderr, flush=True))
    if args.output is None:
        print(text, end="")
    else:
        write_text("--output", args.output, text)
        print(f"{args.output}: bmburst plan --hardware {args.output} uses it")
    return 0


def _is_hardware(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(1000)
    return first.startswith(b"# Measured ") and b"bmburst plan --calibrate" in first
