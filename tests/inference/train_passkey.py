"""Trains the tiny model of tests/inference/passkey, which copies a pass key out of a text of bytes.

    python -m tests.inference.train_passkey        # some minutes on 2 cores; writes tests/inference/passkey

It is too slow for every run of the tests, so its result is kept beside it: config.json and fp16 weights. The
seed and the number of threads are fixed; another version of torch may round otherwise and give other weights, which
answer as well.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bmburst.data.tokenizer import ByteTokenizer
from bmburst.inference.passkey import PasskeyPrompts, PasskeyTest
from bmburst.inference.prompts import PromptEncoder

FOLDER = Path(__file__).with_name("passkey")
SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 648,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 256,
    "initializer_range": 0.05,
}
TOKENS = 2048  # of a step
STAGES = ((100, 128, 4000), (100, 256, 1500), (100, 640, 1500))  # shortest and longest prompt, most steps


def batch(length: int, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts with their answers, and the weight of each label's loss."""
    rows = max(TOKENS // length, 4)
    depths = tuple(np.unique(random.random(rows)).tolist())
    test = PasskeyTest(lengths=(length,), depths=depths, samples=1, seed=int(random.integers(2**62)))
    tokenizer = ByteTokenizer()
    prompts = PasskeyPrompts(tokenizer, test, PromptEncoder(tokenizer, SIZES["vocab_size"]))
    texts = []
    for depth in depths:
        prompt, key = prompts.prompt(length, depth, 0)
        texts.append(np.concatenate([prompt.tokens, tokenizer.encode(f" {key}.")]))
    ids = torch.from_numpy(np.stack(texts))
    weights = torch.full(ids[:, 1:].shape, 0.1)
    weights[:, -7:] = 3.0
    return ids, weights


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    begin, step = time.time(), 0
    for shortest, longest, steps in STAGES:
        right = 0.0
        for index in range(steps):
            ids, weights = batch(int(random.integers(shortest, longest + 1)), random)
            rate = 3e-3 * min(1, (step + 1) / 50) * (1 if longest < 640 else 1 - 0.95 * index / steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            logits = model(ids[:, :-1], use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss = (losses * weights.flatten()).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            hit = (logits[:, -7:].argmax(-1) == ids[:, -7:]).all(1).float().mean().item()
            right = 0.95 * right + 0.05 * hit
            step += 1
            if step % 50 == 0:
                sys.stderr.write(f"{step}: loss {loss.item():.3f}, right {right:.3f}, {time.time() - begin:.0f} s\n")
            if longest < 640 and right > 0.97:
                break
    model.half().save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
