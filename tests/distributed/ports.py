"""A port that a test's ranks meet at, and nobody else takes before they do."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port of this host that the system gives to nobody else in the block.

    It stays bound without listening. Where both sockets reuse addresses, as that of torch's store does, a server may
    listen at it all the same; the system, asked for any free port or for a connection's own end, passes it over. On all
    addresses: the store listens on all, and NCCL on another one than a test's ranks meet at.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
