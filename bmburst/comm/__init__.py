"""Communication between ranks: one interface over bmtrain.nccl, torch.distributed, copy engines, and test threads.

- `communicator.py`: the interface, and functions that send Python objects over it
- `checks.py`: the communicator that compares calls over the ranks
- `groups.py`: makes communicators; `collectives.py`: those over torch.distributed and `bmtrain.nccl`
- `transports.py`: chooses how blocks move, and splits groups for a double ring
- `memory.py`: blocks as messages; `peer.py`, `shared_memory.py`: blocks by copy engines, in memory that ranks share
- `streams.py`, `waits.py`: streams, graphs and waits; `host_memory.py`: copies of shards to and from the host
"""
