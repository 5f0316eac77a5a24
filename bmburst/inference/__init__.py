"""Inference with sequence parallelism: prefill over all ranks, a sharded KV cache, and decoding."""
