"""Measures steps of TRL's GRPOTrainer on long prompts, on split rows beside TRL alone.

    bmburst bench grpo --gpus 2 --prompt 16K --longest 64K --output found.json

A transformers model with the shape of a preset and random weights trains under FSDP2 (DDP on CPUs). Each rank has
`--rows` completions of one prompt. Prompts and completions are random tokens of given lengths in place of generation,
so a step is rewards, loss, backward and update. The reward of a completion is how often it has one token. The ways:

- split: `SplitRows`, with bmburst's `recompute`
- shared: `SplitRows` with share_prompts=True
- trl: TRL alone, with its own gradient checkpointing and SDPA

The ways take turns in the same processes. Each length has processes of its own. Prompts become twice as long until TRL
alone is out of memory, which is a result, or the next one would be longer than `--longest`. Times are medians of whole
steps on the slowest rank, without the first step of a turn. Peaks are those of torch's allocator.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, TrainerCallback

import bmburst
from benchmarks.engine.job import Start
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.hugging_face import shape_of
from bmburst.amounts import GIB, short, tokens
from bmburst.blocks.presets import PRESETS
from bmburst.errors import first_line, require_known
from bmburst.integrations.transformers import NAME, SplitSequences, recompute, register
from bmburst.launch.launcher import LaunchSpec, launch

WAYS = ("split", "shared", "trl")
_OPTIONS = ("model", "layers", "rows", "completion", "steps", "turns")  # those that ranks need
_ROWS, _STARTED, _MEMORY = "rows.jsonl", "started", "memory"
_WORDS = 64  # in the tokenizer's vocabulary, behind the two special tokens


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, default=2, metavar="N", help="GPUs, or ranks on the CPU without GPUs (default: 2)")
    add("--model", default="minicpm5-1b", choices=PRESETS, help="preset of the shape (default: minicpm5-1b)")
    add("--layers", type=int, help="number of layers (default: that of the preset)")
    add("--prompt", type=tokens, default=16384, help="tokens of the first prompts (default: 16K)")
    add("--longest", type=tokens, default=65536, help="tokens of the longest prompts (default: 64K)")
    add("--completion", type=tokens, default=1024, help="tokens of each completion (default: 1K)")
    add("--rows", type=int, default=16, help="completions of a rank (default: 16)")
    add("--ways", default=",".join(WAYS), help="ways, separated by commas (default: all)")
    add("--steps", type=int, default=2, help="measured steps of a turn (default: 2)")
    add("--turns", type=int, default=1, help="turns of each way (default: 1)")


def _measure(options: argparse.Namespace) -> Measured:
    for way in options.ways.split(","):
        require_known("way", way, WAYS)
    facts = {name: getattr(options, name) for name in ("gpus", "model", "layers", "completion")}
    return facts | {"completions_of_a_rank": options.rows}, rows(options)


def rows(options: argparse.Namespace, starter: Start = launch) -> Iterator[Row]:
    """Yield a row for each prompt length and way."""
    length = options.prompt
    while True:
        found: list[Row] = []
        while left := [way for way in options.ways.split(",") if way not in [row["way"] for row in found]]:
            found += _of_processes(length, left, options, starter)
        yield from found
        if 2 * length > options.longest or any("seconds" not in row for row in found if row["way"] == "trl"):
            return
        length *= 2


def _of_processes(length: int, ways: Sequence[str], options: argparse.Namespace, starter: Start) -> list[Row]:
    """Measure in new processes, and return a row for each way up to the first that fails."""
    with tempfile.TemporaryDirectory(prefix="bmburst-grpo-") as name:
        folder = Path(name)
        given = {each: getattr(options, each) for each in _OPTIONS} | {"prompt": length, "ways": ways}
        (folder / "options.json").write_text(json.dumps(given), encoding="utf-8")
        status = starter(LaunchSpec(nproc=options.gpus), ["-m", "benchmarks.grpo", name])
        file = folder / _ROWS
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
        reasons = [path.read_text("utf-8") for path in sorted(folder.glob(f"{_MEMORY}-*"))]
        started = (folder / _STARTED).read_text("utf-8") if (folder / _STARTED).exists() else ways[0]
    found = {way: [line for line in lines if line["way"] == way] for way in ways}
    measured = [_row(length, way, of_way) for way, of_way in found.items() if of_way]
    if status == 0 or found[started]:
        return measured
    why = {"out_of_memory": reasons[0]} if reasons else {"failed": f"exit status {status}"}
    return [*measured, {"tokens": length, "way": started, **why}]


def _row(length: int, way: str, turns: Sequence[Row]) -> Row:
    seconds = [turn["seconds"] for turn in turns]
    row: Row = {"tokens": length, "way": way, "seconds": statistics.median(s for turn in seconds for s in turn[1:])}
    row |= {"seconds_of_turns": seconds, "peak_gib": max(turn["peak_gib"] for turn in turns)}
    return row | {name: turns[0][name] for name in ("grad_norms", "rewards")}


def _rank(folder: Path) -> int:
    """Train in turns as one of the ranks, and write a row of each turn on rank 0."""
    options = argparse.Namespace(**json.loads((folder / "options.json").read_text("utf-8")))
    group = RankGroup.world(start_ranks("cpu:gloo,cuda:nccl"))  # accelerate's own
    register()
    for way in options.ways * options.turns:
        if group.rank == 0:
            (folder / _STARTED).write_text(way, encoding="utf-8")
        try:
            row = _trained(way, options, group, folder)
        except torch.OutOfMemoryError as error:
            (folder / f"{_MEMORY}-{group.rank}").write_text(first_line(error), encoding="utf-8")
            os._exit(1)  # other ranks may wait for this one: the launcher ends them
        if group.rank == 0:
            with (folder / _ROWS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


def _trained(way: str, options: argparse.Namespace, group: RankGroup, folder: Path) -> Row:
    """Train some steps of a way and return its row. All ranks must call it."""
    clock = _Clock(group)
    trainer = _trainer(way, options, group, folder, clock)
    trainer.train()
    logged = trainer.state.log_history
    names = {"grad_norms": "grad_norm", "rewards": "reward"}
    return {
        "way": way,
        "seconds": group.all_reduce(torch.tensor(clock.seconds, device=group.device), dist.ReduceOp.MAX).tolist(),
        "peak_gib": group.largest(clock.peak()),
        **{key: [line[name] for line in logged if name in line] for key, name in names.items()},
    }


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Keeps the seconds of each step, and the peak of torch's allocator after the first one."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._began = group, 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """See `TrainerCallback`."""
        self._group.barrier()
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """See `TrainerCallback`."""
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()
            if not self.seconds:
                torch.cuda.reset_peak_memory_stats()
        self.seconds.append(time.perf_counter() - self._began)

    def peak(self) -> float:
        """Return the peak in GiB; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / GIB if self._group.device.type == "cuda" else 0.0


def _trainer(way: str, options: argparse.Namespace, group: RankGroup, folder: Path, clock: _Clock) -> Any:
    """Return the trainer of a way."""
    from datasets import Dataset

    from bmburst.integrations.transformers_grpo import SplitRows

    trl = import_module("trl")
    on_gpu, is_split = group.device.type == "cuda", way != "trl"
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=options.rows,
        num_generations=options.rows,
        max_completion_length=options.completion,
        max_steps=1 + options.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=not is_split,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        fsdp=True if on_gpu else None,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    config = shape_of(options.model, options.layers)
    config.max_position_embeddings = max(config.max_position_embeddings, options.prompt + options.completion)
    torch.manual_seed(0)
    with group.device:
        attention = NAME if is_split else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    fields: dict[str, Any] = {
        "model": model,
        "reward_funcs": _reward,
        "args": arguments,
        "train_dataset": Dataset.from_list([{"prompt": f"w{i}"} for i in range(group.size * (1 + options.steps))]),
        "processing_class": _tokenizer(),
        "rollout_func": _Drawn(options.prompt, options.completion),
        "callbacks": [clock],
    }
    if not is_split:
        return trl.GRPOTrainer(**fields)
    recompute(model)
    split = SplitSequences(bmburst.Mesh.over_process_group(), layout="balanced" if way == "shared" else "zigzag")
    trainer = type("SplitTrainer", (SplitRows, trl.GRPOTrainer), {})
    return trainer(split=split, share_prompts=way == "shared", **fields)


class _Drawn:
    """In place of generation: a prompt of random tokens for each text, and random completions."""

    def __init__(self, prompt: int, completion: int) -> None:
        self._prompt, self._completion = prompt, completion

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """See `rollout_func` of `GRPOTrainer`."""
        generator = torch.Generator().manual_seed(trainer.state.global_step * 1000 + trainer.accelerator.process_index)
        whole = {text: self._tokens(self._prompt, torch.Generator().manual_seed(int(text[1:]))) for text in prompts}
        completions = [self._tokens(self._completion, generator) for _ in prompts]
        return {"prompt_ids": [whole[text] for text in prompts], "completion_ids": completions, "logprobs": None}

    @staticmethod
    def _tokens(count: int, generator: torch.Generator) -> list[int]:
        found: list[int] = torch.randint(2, 2 + _WORDS, (count,), generator=generator).tolist()
        return found


def _reward(completions: list[str], **_: object) -> list[float]:
    return [float(text.split().count("w0")) for text in completions]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<eos>", "<unk>", *(f"w{i}" for i in range(_WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    layers = "" if record["layers"] is None else f", {record['layers']} layers"
    title = (
        f"GRPO of {record['model']}{layers} on {record['gpus']} x {record['machine']['device']}, a rank's "
        f"{record['completions_of_a_rank']} completions of {short(record['completion'])}:"
    )
    theirs = {row["tokens"]: row["seconds"] for row in record["rows"] if row["way"] == "trl" and "seconds" in row}
    lines, reasons = [], []
    for row in record["rows"]:
        where, alone = f"{short(row['tokens'])}, {row['way']}", theirs.get(row["tokens"])
        if "seconds" not in row:
            reasons.append(f"{where}: {row.get('failed', row.get('out_of_memory'))}")
            lines.append([where, *["-"] * 4])
            continue
        cells = [f"{row['seconds']:.3f}", "-" if alone is None else f"{alone / row['seconds']:.2f}"]
        cells += [f"{row['peak_gib']:.1f}", f"{row['grad_norms'][0]:.4f}"]
        lines.append([where, *cells])
    columns = ["prompt, way", "s a step", "x TRL alone", "GiB allocated", "first gradient norm"]
    return "\n".join([title, "", *markdown_table(columns, lines), *(["", *reasons] if reasons else [])])


BENCHMARKS = (
    RowBenchmark(
        name="grpo", about=__doc__, configure=_configure, measure=_measure, table=table,
        is_wrong=lambda row: "failed" in row,
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1])))
