"""Implements the NCCL functions of `bmtrain.C` over gloo, with the names and arguments of the C functions.

As in NCCL, the calls that a thread makes between ncclGroupStart and the outermost ncclGroupEnd are launched together at
that end. Messages between two ranks of a communicator match in the order of the calls. Unlike in NCCL, a collective is
complete when its call returns, or the ncclGroupEnd of its group. The same holds for a receive on the default stream.
"""

import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.errors import UserError
from bmburst.host.cuda import Stream, Streams, view
from bmburst.host.gloo import GlooCommunicator, Operation
from bmburst.host.stores import LOOPBACK, address_of, is_loopback, serve

UNIQUE_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES in nccl.h
_C10D: Any = dist  # torch gives its C++ classes no types
_DEFAULT_TIMEOUT = 1800.0  # seconds, as torch.distributed's


class Rendezvous:
    """Makes unique ids and opens the stores that they name. A process that makes an id serves a store.

    A process opens one connection to each server: connecting does a reverse DNS query, which may take seconds.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._stores: dict[str, Any] = {}  # torch.distributed TCPStores, by "host port"
        self._numbers = itertools.count()
        self.timeout = _timeout(environment)
        self._address = ""  # of the store for new ids; empty: not served yet

    def unique_id(self) -> bytes:
        """Return 128 bytes that name a new key prefix in a store: `address port number token`."""
        if not self._address:
            address = LOOPBACK if self._on_one_host() else reachable_address(self._environment)
            server = serve(address, 0, self.timeout)
            self._address = f"{address} {server.port}"
            self._stores[self._address] = server
        # The random token keeps processes without this id from reading the keys of its ranks.
        token = secrets.token_hex(16)
        return f"{self._address} {next(self._numbers)} {token}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def open(self, unique_id: bytes) -> object:
        """Return the `torch.distributed.Store` that `unique_id` names; RuntimeError if it did not make these bytes."""
        parts = unique_id.rstrip(b"\0").decode(errors="replace").split(" ")
        if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise RuntimeError("ncclCommInitRank: this unique id was not made by the host runtime's ncclGetUniqueId")
        host, port, number, token = parts
        address = f"{host} {port}"
        if address not in self._stores:
            client = _C10D.TCPStore(host, int(port), None, False, self.timeout, wait_for_workers=False)
            self._stores[address] = client
        return _C10D.PrefixStore(f"communicator/{number}/{token}", self._stores[address])

    def options(self) -> object:
        """Return gloo's options: loopback on one host, else the interfaces that the user names or the system picks."""
        gloo = _C10D.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.timeout
        interfaces = [name for name in self._environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if interfaces:
            options._devices = [gloo.create_device(interface=name) for name in interfaces]
        elif self._on_one_host():
            # The host's own name may resolve to nothing, or to an interface behind a firewall.
            options._devices = [gloo.create_device(hostname=LOOPBACK)]
        else:
            options._devices = [gloo.create_default_device()]
        return options

    def _on_one_host(self) -> bool:
        ranks, here = self._environment.get("WORLD_SIZE", "1"), self._environment.get("LOCAL_WORLD_SIZE")
        if here is not None:
            return here == ranks
        return ranks == "1" or is_loopback(self._environment.get("MASTER_ADDR", "localhost"))


def _timeout(environment: Mapping[str, str]) -> timedelta:
    given = environment.get("BMBURST_TIMEOUT", "")
    try:
        seconds = float(given or _DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(
            f"BMBURST_TIMEOUT is '{given}'\nallowed: seconds above 0\n"
            f"fix: unset it, which means {_DEFAULT_TIMEOUT:g} seconds, or set a number"
        )
    return timedelta(seconds=seconds)


def reachable_address(environment: Mapping[str, str], network: Any = socket) -> str:
    """Return an address of this host that the hosts of the other ranks can reach.

    It is the source address of packets to node 0. If that is a loopback address, this host is node 0, and the result is
    the address of node 0's name.

    Args:
        environment: Names node 0, as torchrun does.
        network: Resolves names and opens sockets, as the module `socket`.

    Raises:
        RuntimeError: No route leads to node 0.
    """
    master = environment.get("MASTER_ADDR", "localhost")
    port = int(environment.get("MASTER_PORT", "0")) or 9  # discard; nothing is sent
    for family, kind, protocol, _, address in network.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
        with network.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # for UDP this only asks the routing table
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return address_of(master, network) if is_loopback(own) else own
    raise RuntimeError(f"this host has no route to node 0, '{master}'")


# ncclDataType_t and ncclRedOp_t of nccl.h: the values that bmtrain.nccl names. Its ncclBool is ncclInt8.
DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
OPERATORS = ("sum", "prod", "max", "min", "avg")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that has not been launched."""

    launch: Callable[[], Operation]
    stream: Stream
    touches: tuple[tuple[int, int], ...]  # address and size in bytes of memory that it reads or writes
    later: bool = False  # it may still be pending when the call returns


class _NcclGroup(threading.local):
    """The open group of each thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Nccl:
    """The NCCL functions that `bmtrain.C` has. Errors are raised, not returned."""

    def __init__(self, streams: Streams, rendezvous: Rendezvous) -> None:
        self._streams = streams
        self._rendezvous = rendezvous
        self._communicators: dict[int, GlooCommunicator] = {}
        self._next_handle = 1
        self._group = _NcclGroup()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes the context in which calls are launched. It measures how long they block the host."""

    def ncclGetUniqueId(self) -> bytes:
        """Return a new id. One rank makes it, and every rank of the communicator passes it to `ncclCommInitRank`."""
        return self._rendezvous.unique_id()

    def ncclCommInitRank(self, unique_id: bytes, size: int, rank: int) -> int:
        """Create a communicator with the other ranks and return its handle."""
        if size > 1:
            communicator = GlooCommunicator(self._rendezvous.open(unique_id), rank, size, self._rendezvous.options())
        else:
            communicator = GlooCommunicator(None, rank, size, None)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._communicators[handle] = communicator
        return handle

    def ncclCommDestroy(self, handle: int) -> None:
        """Close a communicator after its pending sends."""
        self._of(handle)
        self._communicators.pop(handle).close(self._rendezvous.timeout.total_seconds())

    def ncclCommCount(self, handle: int) -> int:
        """Return the number of ranks."""
        return self._of(handle).size

    def ncclCommUserRank(self, handle: int) -> int:
        """Return this process's rank."""
        return self._of(handle).rank

    def ncclGroupStart(self) -> None:
        """Defer the calls of this thread until the group ends. Groups nest."""
        self._group.depth += 1

    def ncclGroupEnd(self) -> None:
        """Launch the deferred calls together at the end of the outermost group."""
        if self._group.depth == 0:
            raise RuntimeError("ncclGroupEnd without ncclGroupStart")
        self._group.depth -= 1
        if self._group.depth == 0:
            calls, self._group.calls = self._group.calls, []
            with self.waiting():
                _run(calls)

    def ncclAllReduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int) -> None:
        """Reduce over all ranks. Every rank gets the result."""
        communicator, out = self._of(comm), _tensor(target, count, dtype)
        data, reduction = _tensor(source, count, dtype), _operator(op)
        self._call(lambda: communicator.all_reduce(data, out, reduction), stream, data, out)

    def ncclReduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> None:
        """Reduce over all ranks. Rank `root` gets the result."""
        communicator, reduction = self._of(comm), _operator(op)
        data = _tensor(source, count, dtype)
        out = _tensor(target, count, dtype) if communicator.rank == root else data  # not written elsewhere
        self._call(lambda: communicator.reduce(data, out, reduction, root), stream, data, out)

    def ncclBroadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        """Copy from rank `root` to all ranks."""
        communicator, out = self._of(comm), _bytes(target, count, dtype)
        data = _bytes(source, count, dtype) if communicator.rank == root else out
        self._call(lambda: communicator.broadcast(data, out, root), stream, data, out)

    def ncclAllGather(self, source: int, target: int, count: int, dtype: int, comm: int, stream: int) -> None:
        """Gather `count` elements of each rank in rank order, on all ranks."""
        communicator = self._of(comm)
        data, out = _bytes(source, count, dtype), _bytes(target, count * communicator.size, dtype)
        rows = out.view(communicator.size, -1)
        self._call(lambda: communicator.all_gather(data, rows), stream, data, out)

    def ncclReduceScatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce over all ranks. Rank r gets the r-th block of `count` elements."""
        communicator, reduction = self._of(comm), _operator(op)
        data, out = _tensor(source, count * communicator.size, dtype), _tensor(target, count, dtype)
        rows = data.view(communicator.size, -1)
        self._call(lambda: communicator.reduce_scatter(rows, out, reduction), stream, data, out)

    def ncclSend(self, source: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Send a copy of the memory to rank `peer`. Does not wait for the receive."""
        communicator, data = self._with(comm, peer), _bytes(source, count, dtype)
        self._call(lambda: communicator.send(data, peer), stream, data)

    def ncclRecv(self, target: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Receive from rank `peer`. If the stream is not the default, waiting for it waits for the message."""
        communicator, out = self._with(comm, peer), _bytes(target, count, dtype)
        later = self._streams.of(stream) is not self._streams.default
        self._call(lambda: communicator.receive(out, peer, later=later), stream, out, later=later)

    def close(self, patience: float) -> None:
        """Close every communicator. Wait at most `patience` seconds for the pending sends of each."""
        for communicator in self._communicators.values():
            communicator.close(patience)
        self._communicators.clear()

    def _call(self, launch: Callable[[], Operation], stream: int, *data: Tensor, later: bool = False) -> None:
        if data[0].numel() == 0:
            return  # as in NCCL, no rank sends anything
        touches = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in data)
        call = _Call(launch=launch, stream=self._streams.of(stream), touches=touches, later=later)
        if self._group.depth:
            self._group.calls.append(call)
        else:
            with self.waiting():
                _run([call])

    def _with(self, handle: int, peer: int) -> GlooCommunicator:
        communicator = self._of(handle)
        if not 0 <= peer < communicator.size:
            raise RuntimeError(f"NCCL: rank {peer} is not one of this communicator's {communicator.size} ranks")
        return communicator

    def _of(self, handle: int) -> GlooCommunicator:
        if handle not in self._communicators:
            raise RuntimeError(f"NCCL: {handle} is not an open communicator")
        return self._communicators[handle]


def _run(calls: list[_Call]) -> None:
    """Launch all calls, then wait for those that must be complete on return."""
    for call in calls:
        for address, nbytes in call.touches:
            call.stream.settle(address, nbytes)
    started = [(call, call.launch()) for call in calls]
    for call, operation in started:
        if call.later:
            call.stream.add(operation)
    for call, operation in started:
        if not call.later:
            operation.finish()


def _tensor(address: int, count: int, dtype: int) -> Tensor:
    if dtype not in DTYPES:
        raise RuntimeError(f"NCCL: data type {dtype} is not one of those BMTrain uses: {sorted(DTYPES)}")
    return view(address, count, DTYPES[dtype])


def _bytes(address: int, count: int, dtype: int) -> Tensor:
    return _tensor(address, count, dtype).view(torch.uint8)


def _operator(op: int) -> str:
    if not 0 <= op < len(OPERATORS):
        raise RuntimeError(f"NCCL: operator {op} is not one of 0 to {len(OPERATORS) - 1}")
    return OPERATORS[op]
