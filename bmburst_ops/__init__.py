"""Single-device operations, independent of ranks: attention kernels and the fused operations around them."""
