"""`bmburst bench paper` and the formulas of `docs/paper.md`: the BurstAttention paper (arXiv:2403.09347).

`kind` and `measure` contain the measurements that no other benchmark has: bytes and milliseconds of the transfers in
backward, the paper's ablations, and the tables of Burst-Attention's README. `overheads` contains the formulas of the
paper's first table, and `perplexity` measures its last one.
"""
