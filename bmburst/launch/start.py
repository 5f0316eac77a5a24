"""`bmburst.start`: starts BMTrain on this rank's GPU or CPU. Call it before anything that imports bmtrain."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from bmburst.errors import RunError, UserError
from bmburst.host import stores
from bmburst.memory import DRIVER_IS_FULL
from bmburst.schedule.parallelism import MeshShape

if TYPE_CHECKING:
    import torch


_LOG = logging.getLogger("bmburst.launch.start")
_FOUND_PORT = "BMBURST_FOUND_PORT"
_SCHEME = "bmburst"  # of `torch.distributed.rendezvous`
_TIMEOUT = 1800.0  # seconds, as in BMTrain
_store: Any = None  # the store that this process serves for its job; it ends with the process
_has_joined = False  # whether `_complete_environment` has run


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """One rank of the job."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among those of this host."""
    device: "torch.device"
    """Device of this rank's tensors."""
    on_host: bool
    """Whether the host runtime replaces CUDA."""


def start(*, seed: int = 0, tensor: int | None = None, pipe: int | None = None) -> Runtime:
    """Start BMTrain on this rank's GPU, or without CUDA on the CPU with the host runtime.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which launchers set; without them
    the process is a job of one rank. Seeds the generators of Python, numpy and torch with the same seed on every rank.
    A second call, or a call after `bmtrain.init_distributed`, changes nothing and returns the same result.

    Args:
        seed: Seed of all random number generators, from 0 to 2^32 - 1.
        tensor: Tensor parallel degree of the models built later (BMTrain's `tp_size`). Default: 1, or the degree with
            which BMTrain was started.
        pipe: Stages of a pipeline (BMTrain's `pipe_size`). Default: 1, or the stages of a running BMTrain.

    Raises:
        UserError: The environment does not define a rank, BMTrain is missing, a degree does not divide the ranks or
            differs from that of a running BMTrain, the seed is invalid, or MASTER_PORT is taken.
        RunError: The GPU has no memory left for another process.
    """
    import torch

    from bmburst import host

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"seed {seed!r}\nallowed: a whole number from 0 to {2**32 - 1}\nfix: bmburst.start(seed=0)")
    if not _bmtrain_has_started():
        _complete_environment()
        if not torch.cuda.is_available():
            host.install()
        _start_bmtrain(seed, 1 if tensor is None else tensor, 1 if pipe is None else pipe)
    import bmtrain as bmt

    for name, asked, key in (("tensor", tensor, "tp_size"), ("pipe", pipe, "pipe_size")):
        if asked is not None and asked != bmt.config[key]:
            raise UserError(
                f"{name} {asked}, but BMTrain was started with {bmt.config[key]}\n"
                f"fix: bmburst.start({name}={asked}) before anything else starts BMTrain"
            )

    on_host = host.is_installed()
    local_rank = int(bmt.config["local_rank"])
    return Runtime(
        rank=int(bmt.config["rank"]),
        world_size=int(bmt.config["world_size"]),
        local_rank=local_rank,
        device=torch.device("cpu") if on_host else torch.device("cuda", local_rank),
        on_host=on_host,
    )


def join() -> Any:
    """Complete this rank's environment, and return a client of the ranks' store, a `torch.distributed.Store`.

    It serves to exchange values before BMTrain starts.

    Raises:
        UserError: The environment does not define a rank, or MASTER_PORT is taken.
    """
    import torch.distributed as dist

    _complete_environment()
    stores: Any = dist  # torch does not list its stores among the names it exports
    if _number("WORLD_SIZE", default=1) == 1:
        return stores.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = stores.TCPStore(address, port, None, False, timedelta(seconds=_TIMEOUT), wait_for_workers=False)
    # torchrun's own store has the keys of the ranks before a restart. A store that rank 0 serves is new; only there the
    # counts of the nodes may differ.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _launcher_serves() else 0
    return stores.PrefixStore(f"bmburst/{restarts}", store)


def _launcher_serves() -> bool:
    """Return whether torchrun serves the store of the ranks, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _init_method() -> str:
    """Return where BMTrain shall find the store of the ranks.

    After a restart, torchrun's own store still has the ids of the communicators of the ranks before. A rank that reads
    one before rank 0 has written the new one would try to connect to a process that is gone, until the timeout.
    """
    if not _launcher_serves():
        return "env://"
    _register_store()
    return f"{_SCHEME}://"


@cache
def _register_store() -> None:
    import torch.distributed as dist

    handlers: Any = dist  # torch does not list this function among the names it exports
    handlers.register_rendezvous_handler(_SCHEME, _found_store)


def _found_store(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store of `join`, this rank and the number of ranks, as `torch.distributed.rendezvous` does."""
    yield join(), _number("RANK", default=0), _number("WORLD_SIZE", default=1)


def _bmtrain_has_started() -> bool:
    bmtrain = sys.modules.get("bmtrain")
    return bmtrain is not None and bool(bmtrain.config["initialized"])


def _start_bmtrain(seed: int, tensor: int, pipe: int) -> None:
    import torch

    # BMTrain checks this only after the ranks have connected, with an assert.
    MeshShape.fit(int(os.environ.get("WORLD_SIZE", "1")), tensor=tensor, pipe=pipe)

    from bmburst import host

    try:
        import bmtrain.init
    except ImportError as error:
        raise UserError(
            f"BMTrain cannot be imported: {error}\nfix: build it for this Python and CUDA: bmburst build-bmtrain"
        ) from error
    host.silence_deprecations()
    cudnn, print_dict = torch.backends.cudnn.enabled, bmtrain.init.print_dict
    # BMTrain prints ten lines per rank to stdout, which is for results.
    bmtrain.init.print_dict = lambda title, facts: _LOG.debug("BMTrain: %s %s", title, facts)
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        # -1: BMTrain makes no communicators for stages.
        bmtrain.init.init_distributed(_init_method(), seed=seed, tp_size=tensor, pipe_size=pipe if pipe > 1 else -1)
    except RuntimeError as error:
        if DRIVER_IS_FULL not in str(error):
            raise
        raise RunError(
            f"GPU {os.environ.get('LOCAL_RANK', '0')} has no memory left for this rank: {DRIVER_IS_FULL}\n"
            "fix: end the other programs on it, which nvidia-smi lists, or choose GPUs with CUDA_VISIBLE_DEVICES",
            on_all_ranks=False,
        ) from error
    finally:
        bmtrain.init.print_dict = print_dict
        torch.backends.cudnn.enabled = cudnn  # BMTrain switches it off for the whole process
    if host.is_installed():
        _restore_cores(cores)
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(threads)


def _restore_cores(cores: set[int]) -> None:
    """Let all threads of this process run on these cores again.

    BMTrain pins every rank to its share of the cores and starts one thread per core, regardless of OMP_NUM_THREADS and
    of a container's quota. If ranks compute on the CPU, threads then wait for each other by spinning, and a rank waits
    for its core while others are idle.
    """
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task), cores)


def _complete_environment() -> None:
    """Set what a launcher may leave out and BMTrain reads, once a process; UserError for variables in conflict."""
    global _has_joined
    if _has_joined:
        return
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"RANK is {os.environ['RANK']} but WORLD_SIZE is not set\n"
            "fix: unset RANK for one rank; start several with bmburst launch --nproc N -- SCRIPT"
        )
    world = _number("WORLD_SIZE", default=1)
    if world == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        # BMTrain's default port would clash with another job of one rank. A port that the parent process has found for
        # itself would clash with the parent.
        if os.environ.get("MASTER_PORT") in (None, os.environ.get(_FOUND_PORT)):
            os.environ["MASTER_PORT"] = "0"
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 and name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set\n"
            f"fix: start the ranks with bmburst launch --nproc {world} -- SCRIPT"
        )
    rank = _number("RANK", default=0)
    here = _number("LOCAL_WORLD_SIZE", default=world)
    local_rank = _number("LOCAL_RANK", default=rank % max(here, 1))
    if not (0 <= rank < world and 0 <= local_rank < here <= world):
        raise UserError(
            f"RANK is {rank} of WORLD_SIZE {world}, LOCAL_RANK is {local_rank} of LOCAL_WORLD_SIZE {here}\n"
            "allowed: 0 <= RANK < WORLD_SIZE, 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE\n"
            "fix: start the ranks with bmburst launch --nproc N -- SCRIPT"
        )
    if world > 1:
        stores.require_interfaces()
    # BMTrain's default for LOCAL_WORLD_SIZE is 1; then it fails to assign CPUs to ranks after the first.
    on_one_host = world == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(here), str(local_rank)
    if on_one_host:
        for name, value in stores.LOOPBACK_ONLY.items():
            os.environ.setdefault(name, value)
    if _launcher_serves():
        if world > 1:
            _require_address()
    else:
        if rank == 0:
            _serve_store(on_one_host)
        if on_one_host:  # where rank 0 serves it
            os.environ["MASTER_ADDR"] = stores.LOOPBACK
    _has_joined = True


def _require_address() -> None:
    """Check that the name at which torchrun serves its store can be resolved; torch would try for half an hour.

    It is what the first node calls itself, which other nodes and containers may not know.
    """
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # others may pass
            raise UserError(
                f"MASTER_ADDR is '{address}', the name of the first node, which this host cannot resolve\n"
                "fix: torchrun --local-addr ADDRESS on the first node, with an address that other nodes reach; "
                "or add the name to /etc/hosts"
            ) from None


def _serve_store(on_one_host: bool) -> None:
    """Serve the store of the ranks at one address only; BMTrain would serve it at all. BMTrain finds it by its port."""
    global _store
    address = os.environ["MASTER_ADDR"]
    try:
        address = stores.LOOPBACK if on_one_host else stores.address_of(address)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is '{address}', which this host cannot resolve: {error.strerror}\n"
            "fix: set it to the name or address of rank 0's host"
        ) from None
    _store = stores.serve(address, _number("MASTER_PORT", default=0), timedelta(seconds=_TIMEOUT))
    if os.environ["MASTER_PORT"] == "0":
        os.environ[_FOUND_PORT] = str(_store.port)
    os.environ["MASTER_PORT"] = str(_store.port)


def _number(name: str, *, default: int) -> int:
    value = os.environ.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is '{value}', not a whole number\nfix: unset it, or let a launcher set it") from None
