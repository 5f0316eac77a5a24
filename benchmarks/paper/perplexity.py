"""Perplexity of one model with every method: `python -m benchmarks.paper.perplexity --ranks 2 --output FILE.json`.

The text is the held-out part of a training corpus. All methods evaluate the same weights on the same sequences, in fp32
on CPUs over gloo, in bfloat16 on GPUs. `--model` takes a checkpoint of `bmburst train`, or the directory of a Hugging
Face model with its tokenizer. Without it, a small model is first trained on Python's standard library, and the record
says so. For a method that cannot evaluate the model, the row gives the reason.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.machine import publish
from benchmarks.engine.report import markdown_table
from benchmarks.training import METHODS, TrainCell, TrainMethod
from bmburst.amounts import tokens as read_tokens
from bmburst.amounts import whole_number
from bmburst.errors import UserError
from bmburst.launch.launcher import LaunchSpec, launch
from bmburst.train.config import DataConfig, ParallelConfig, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.attention.method import Attend
    from bmburst.train.trainer import Trainer

MODULE = "benchmarks.paper.perplexity"
_TRAINED = ("--preset", "llama-tiny", "--seed", "1", "--sequence-length", "512")
# The methods of the paper's table 4, ours by heads, and one rank. In "no-lao" the kernel writes scores to memory.
BURST, NO_LAO, ALONE = "burst", "no-lao", "alone"
WAYS: dict[str, TrainMethod] = {
    ALONE: METHODS["ours"],
    **METHODS,
    BURST: TrainMethod(name=BURST, strategy="burst", by_messages=True),
    NO_LAO: TrainMethod(name=NO_LAO, strategy="burst", by_messages=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="ranks that share a sequence (default: 2)")
    add("--model", type=Path, metavar="DIR", help="checkpoint or Hugging Face directory (default: train a small model)")
    add("--steps", type=int, default=80, metavar="N", help="training steps of the small model (default: 80)")
    add("--data", default="stdlib", metavar="TEXT", help="text, see --data.source of bmburst train (default: stdlib)")
    add("--tokenizer", metavar="NAME", help="see bmburst train (default: the model's, else bytes)")
    add("--tokens", type=read_tokens, default=1024, metavar="N", help="tokens of a sequence (default: 1024)")
    add("--sequences", type=int, default=8, metavar="N", help="held-out sequences (default: 8)")
    add("--output", type=Path, metavar="FILE", help="JSON file of the results; its table is written as .md")
    add("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.rank is not None:
            run_rank(**json.loads(options.rank))
            return 0
        whole_number("--ranks", options.ranks, 1)
        with tempfile.TemporaryDirectory(prefix="bmburst-perplexity-") as folder:
            found = _measure(options, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(options.output, MODULE, table(found), options.ranks, **found)
    return 0


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a model if none is given, evaluate it by every method, and return the record."""
    model, trained = options.model, None
    if model is None:
        trained = ["train", *_TRAINED, "--steps", str(options.steps)]
        trained += ["--eval-every", "0", "--sample-tokens", "0", "--checkpoint-every", "0"]
        where = ["--output", str(folder / "run"), "--data.cache", str(folder)]
        _start(LaunchSpec(nproc=1, host_runtime=True), ["-m", "bmburst", *trained, *where])
        model = max((folder / "run" / "checkpoints").iterdir())
    shared = {
        "model": str(model.absolute()),
        "data": options.data,
        "tokenizer": options.tokenizer,
        "tokens": options.tokens,
        "sequences": options.sequences,
        "folder": str(folder),
    }
    rows: dict[str, Any] = {}
    for ranks, tensor in ((1, 1), (options.ranks, 1), (options.ranks, options.ranks)):
        names = [name for name, way in WAYS.items() if _belongs(name, way, ranks, tensor)]
        setting = shared | {"ways": names, "tensor": tensor}
        _start(LaunchSpec(nproc=ranks, host_runtime=True), ["-m", MODULE, "--rank", json.dumps(setting)])
        rows |= json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return {
        "trained": None if trained is None else "bmburst " + " ".join(trained),
        "model": "the trained model" if trained is not None else str(options.model),
        **{name: shared[name] for name in ("data", "tokens", "sequences")},
        "rows": {name: rows[name] for name in WAYS if name in rows},
    }


def _belongs(name: str, way: TrainMethod, ranks: int, tensor: int) -> bool:
    """Return whether a method is evaluated in the start with this number of ranks and this tensor degree."""
    return (name == ALONE) == (ranks == 1) and way.shares_matrices == (tensor > 1)


def _start(spec: LaunchSpec, words: list[str]) -> None:
    status = launch(spec, words)
    if status:
        raise SystemExit(status)


def run_rank(
    model: str,
    data: str,
    tokenizer: str | None,
    tokens: int,
    sequences: int,
    folder: str,
    ways: list[str],
    tensor: int,
) -> None:
    """Evaluate the model by each of the methods on this rank; rank 0 writes their rows."""
    from benchmarks.engine.machine import start_ranks
    from bmburst.launch.start import start
    from bmburst.train.resolve import read_hugging_face_config

    runtime = start(seed=0, tensor=tensor)
    where = Path(folder)
    # BMTrain uses the launcher's store, so torch.distributed needs its own rendezvous.
    meeting = where / f"meeting-{runtime.world_size}-{tensor}"
    start_ranks(init_method=meeting.as_uri(), rank=runtime.rank, world_size=runtime.world_size)
    shape = read_hugging_face_config(Path(model))
    config = TrainConfig(
        preset=None,
        model=replace(shape, max_position_embeddings=max(tokens, shape.max_position_embeddings)),
        init_from=Path(model),
        sequence_length=tokens,
        steps=1,
        dtype="bfloat16" if runtime.device.type == "cuda" else "float32",
        eval_sequences=sequences,
        output=where / "evaluated",
        data=DataConfig(source=data, tokenizer=tokenizer, cache=where),
    )
    rows = {name: _row(name, config, runtime.world_size, runtime.device.type) for name in ways}
    if runtime.rank == 0:
        (where / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def _row(name: str, config: TrainConfig, ranks: int, device: str) -> dict[str, Any]:
    """Return the row of `evaluate`, or the reason for a refusal. On one rank, a refusal is an error."""
    try:
        return {"ranks": ranks, **evaluate(name, config, ranks, device)}
    except UserError as error:
        if name == ALONE:
            raise
        return {"ranks": ranks, "refused": str(error).splitlines()[0]}


def evaluate(name: str, config: TrainConfig, ranks: int, device: str) -> dict[str, Any]:
    """Return loss in nats per token, perplexity and number of labels of the held-out text. All ranks must call it.

    Raises:
        UserError: The method cannot evaluate this model. All ranks raise it.
    """
    from benchmarks.training.measure import put
    from bmburst.train.trainer import Trainer

    way = WAYS[name]
    if (way.peer or name == NO_LAO) and config.model.sliding_window is not None:
        raise UserError(f"{name} has no sliding window, but the model has\nfix: a model without sliding_window")
    if (way.peer or way.replicated) and config.sequence_length % ranks:
        raise UserError(f"{config.sequence_length} tokens do not divide by {ranks} ranks\nfix: a multiple")
    trainer = Trainer(replace(config, parallel=_parallel(way, ranks, device)))
    trainer.restore()
    if way.replicated:
        from benchmarks.training.tensor_v1 import replicate

        replicate(trainer.model)
    if way.peer:
        put(trainer.model, _peer(way.peer, trainer, ranks, device))
    if name == NO_LAO:
        put(trainer.model, _without_lao(trainer))
    found = trainer.evaluate()
    return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}


def _peer(name: str, trainer: "Trainer", ranks: int, device: str) -> "Attend":
    """Return a method of the attention benchmark, bound to the trainer's shapes."""
    from benchmarks.attention import Cell
    from benchmarks.attention.method import LocalKernel, Setting
    from benchmarks.attention.methods import all_methods
    from benchmarks.engine.machine import RankGroup

    shape = trainer.model.config
    cell = Cell(
        suite="sequence",
        method=name,
        ranks=ranks,
        device=device,
        dtype=trainer.config.dtype,
        tokens=trainer.config.sequence_length,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    method = all_methods(device)[name]
    if (refusal := method.refusal(cell)) is not None:
        raise UserError(f"{refusal}\nfix: another number of ranks")
    group = RankGroup.world(trainer.runtime.device)  # `run_rank` created it
    return method.bind(cell, Setting(group=group, kernel=LocalKernel()))


def _without_lao(trainer: "Trainer") -> "Attend":
    """Return attention over a ring whose kernel writes the scores of each tile to memory; forward only."""
    from benchmarks.paper.measure import WholeTile
    from bmburst.attention.call import decide
    from bmburst.attention.options import AttentionOptions
    from bmburst.attention.ring import ring_forward

    options = AttentionOptions(strategy="burst")

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        call = decide(trainer.mesh.sequence, q, k, v, None, options)
        return ring_forward(replace(call, kernel=WholeTile()), q, k, v).out

    return attend


def _parallel(way: TrainMethod, ranks: int, device: str) -> ParallelConfig:
    cell = TrainCell(
        suite="step", method=way.name, ranks=ranks, device=device, preset="llama-tiny", layers=1, tokens=2 * ranks
    )
    return way.parallel(cell)


def table(found: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = []
    for name, row in found["rows"].items():
        is_refused = "refused" in row
        numbers = (
            [f"refused: {row['refused']}", "-"] if is_refused else [f"{row['loss']:.6f}", f"{row['perplexity']:.4f}"]
        )
        lines.append([name, row["ranks"], *numbers])
    return "\n".join(markdown_table(["method", "ranks", "loss, nats a token", "perplexity"], lines))


if __name__ == "__main__":
    sys.exit(main())
