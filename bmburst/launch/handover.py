"""Hands one request to all ranks: resolved and checked once, above, and trusted by the ranks.

A command resolves its options to a request, a dictionary of JSON types. `run_command` starts ranks on this machine,
each of which calls `run_rank(request)` of a module. If torchrun started this process as one of its ranks, rank 0
resolves the request, and the other ranks get it through the ranks' store.
"""

import contextlib
import hashlib
import importlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from socket import gethostname
from typing import Any

from bmburst import __version__
from bmburst.errors import UserError
from bmburst.launch import devices
from bmburst.launch.rank import FOLDER, REQUEST, limit_teardown
from bmburst.launch.spec import LaunchSpec
from bmburst.setup.kernel_caches import flash_attention_4

Request = Mapping[str, Any]
Settle = Callable[[int | None], AbstractContextManager[tuple[Request | None, LaunchSpec]]]
"""Decides and checks all that ranks do, once. It gets the number of ranks if another launcher has started them; this is
rank 0 then. In its context are the request to the ranks, None if there is nothing to do, and how they are watched."""
_KEY, _READERS = "request", "ranks that have read it"
_CHECKED, _PROBLEM = "ranks with the code of rank 0", "code of another rank"
_BAD_INPUT = 2
_ARRIVAL = 300.0  # seconds that rank 0 waits for ranks of other nodes; launchers start all at about the same time
_FAREWELL = 60.0  # seconds that rank 0 waits for ranks that are still starting


def run_command(module: str, settle: Settle, here: Callable[[Request], int] | None = None) -> int:
    """Settle a request, let all ranks call `run_rank(request)` of a module, and return the exit status.

    Args:
        module: Name of the module. Its `run_rank` returns the exit status of a rank.
        settle: See `Settle`.
        here: Does the work of a single rank in this process, and returns the exit status; None: a rank is started.

    Raises:
        UserError: `settle` or the work raises it. Ranks of another launcher return 2 then, but for rank 0.
    """
    if "RANK" in os.environ:  # a launcher has set it
        return _run_joined_rank(module, settle)
    with settle(None) as (request, spec):
        if request is None:
            return 0
        if here is not None and spec.nproc == 1:
            _keep_kernels()
            return here(request)
        return run_on_ranks(module, request, spec)


def run_on_ranks(module: str, request: Request, spec: LaunchSpec) -> int:
    """Start ranks on this machine that call `run_rank(request)` of a module, and return the exit status.

    Args:
        module: Name of the module. Its `run_rank` returns the exit status of a rank.
        request: What all ranks get, of JSON types.
        spec: How many ranks, and how they are watched.
    """
    from bmburst.launch.launcher import launch

    return launch(spec, ["-m", "bmburst.launch.handover", module], json.dumps(request))


def _run_joined_rank(module: str, settle: Settle) -> int:
    """Run this process, which another launcher started, as a rank. Returns its exit status."""
    from bmburst.launch.start import join

    store, world = join(), int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] != "0":
        told = json.loads(store.get(_KEY).decode())
        store.add(_READERS, 1)
        if isinstance(told, int):
            return told
        try:
            if first := told.pop("first", None):
                require_code(**first)
        except UserError as error:
            store.set(_PROBLEM, str(error))  # rank 0 says it
            return _BAD_INPUT
        store.add(_CHECKED, 1)
        try:
            return _watched(module, **told)
        except UserError:
            return _BAD_INPUT
    with contextlib.ExitStack() as stack:
        try:
            request, spec = stack.enter_context(settle(world))
        except BaseException:
            _tell(store, _BAD_INPUT, world)
            raise
        if request is None:
            return _tell(store, 0, world)
        limits = {"hang_timeout": spec.hang_timeout, "start_timeout": spec.start_timeout}
        told = {"request": request, "limits": limits, "token": secrets.token_hex(8)}
        has_other_nodes = os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]
        first = {"host": gethostname(), "code": _code()} if has_other_nodes else None
        store.set(_KEY, json.dumps(told | {"first": first}))
        if first:
            _await_nodes(store, world)
        return _watched(module, **told)


def require_code(host: str, code: str) -> None:
    """Raise UserError unless this rank runs the code of rank 0, with which it would exchange what that does not expect.

    Args:
        host: The host of rank 0.
        code: What `_code` returned there.
    """
    if (own := _code()) != code:
        raise UserError(
            f"host {gethostname()} has {own}, but rank 0 on host {host} has {code}\n"
            "fix: install the same versions on every node, or run from a folder that they share"
        )


def _await_nodes(store: Any, world: int) -> None:
    """Wait in rank 0 until all ranks have compared code with it; UserError if one differs. Lost ranks tell so."""
    until = time.monotonic() + _ARRIVAL
    while store.add(_CHECKED, 0) < world - 1 and time.monotonic() < until:
        if store.check([_PROBLEM]):
            raise UserError(store.get(_PROBLEM).decode())
        time.sleep(0.05)


def _code() -> str:
    """Return what must be the same on all nodes: versions, and a digest of this package's code."""
    digest, root = hashlib.blake2b(digest_size=4), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    found = [f"bmburst {__version__} (code {digest.hexdigest()})"]
    for name in ("torch", "bmtrain"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _tell(store: Any, status: int, world: int) -> int:
    """Let the other ranks end with a status. Waits until they know it: the store may end with this process."""
    store.set(_KEY, json.dumps(status))
    until = time.monotonic() + _FAREWELL
    while store.add(_READERS, 0) < world - 1 and time.monotonic() < until:
        time.sleep(0.05)
    return status


def _watched(module: str, request: Request, limits: Mapping[str, Any], token: str) -> int:
    from bmburst.launch.joined import watch

    folder = Path(tempfile.gettempdir()) / f"bmburst-ranks-{token}"
    watch(LaunchSpec(nproc=int(os.environ["LOCAL_WORLD_SIZE"]), **limits), folder)
    _keep_kernels()
    try:
        return _call(module, request)
    except BaseException:
        limit_teardown(folder)
        raise


def _keep_kernels() -> None:
    if devices.gpus():
        os.environ.update(flash_attention_4(os.environ))


def _call(module: str, request: Request) -> int:
    status: int = importlib.import_module(module).run_rank(request)
    return status


if __name__ == "__main__":
    sys.exit(_call(sys.argv[1], json.loads((Path(os.environ[FOLDER]) / REQUEST).read_text(encoding="utf-8"))))
