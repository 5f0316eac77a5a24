"""`bmburst bench paper`: measurements of `docs/paper.md` on the BurstAttention paper (arXiv:2403.09347).

`kind` and `measure` contain the measurements that no other benchmark has: bytes and milliseconds of the transfers in
backward, the paper's ablations, and the tables of Burst-Attention's README. `perplexity` measures the paper's last
table.
"""
