"""Inference on split sequences: prefill over all ranks, a sharded KV cache, and decoding."""
