"""Plans attention over several ranks: layouts, masks, tiles, schedules, communication, and its cost.

Nothing here imports torch or communicates, so that `bmburst plan` works without torch and GPUs. The executors in
`bmburst.attention` and `bmburst.comm` follow these plans.

- `layout.py`, `mask.py`, `documents.py`, `tree.py`: which rank holds which tokens, which keys a query sees
- `tiles.py`, `ring_schedule.py`: which rank computes which tile of the score matrix at which step
- `heads_plan.py`, `gather_plan.py`, `units.py`, `exchange.py`: which bytes move between which ranks
- `strategy.py`, `cost.py`, `hardware.py`: the choice of the fastest strategy
- `cross.py`: cross-attention as a pair of layouts and a mask
- `cache_split.py`: which heads and tokens of a KV cache each rank keeps
- `parallelism.py`: data, sequence and tensor groups of ranks, and the strategies of attention by name
"""
