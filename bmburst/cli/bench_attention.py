"""`bmburst bench attention`: its options, as cells and a job."""

import argparse
from typing import Any

from bmburst.amounts import tokens
from bmburst.bench.cells import HEAD_DIM, MASKS, Choice, list_cells
from bmburst.bench.job import RUNTIMES, Job
from bmburst.cli.bench_kind import Kind, Prepared, Shown, chosen, of_jobs, require_kernel
from bmburst.cli.numbers import numbers
from bmburst.errors import UserError


def configure(group: argparse._ArgumentGroup) -> None:
    """Add the options that only this benchmark has."""
    add = group.add_argument
    add(
        "--runtime",
        choices=RUNTIMES,
        default="torch",
        help="process groups of torch.distributed or of BMTrain (default: torch)",
    )
    add("--heads", type=int, metavar="N", help="query heads, instead of 32/32 and 32/8")
    add("--kv-heads", type=int, metavar="N", help="KV heads (default: as --heads)")
    add("--head-dim", type=int, metavar="N", default=HEAD_DIM, help=f"head dimension (default: {HEAD_DIM})")
    add("--mask", choices=(*MASKS, "all"), default="all", help="masks to measure (default: all)")
    add("--deterministic", action="store_true", help="call burst_attention with deterministic=True")


def _prepare(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> Prepared:
    for name in ("heads", "kv_heads", "head_dim"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}\nallowed: 1 and more")
    if len(ranks) > 1:
        given = f"--gpus {args.gpus}" if args.ranks is None else f"--ranks {args.ranks}"
        raise UserError(f"{given}: attention is measured on one number of ranks\nfix: a run for each")
    from bmburst.bench.methods import all_methods

    methods = all_methods(device)
    cells = list_cells(_choice(args, device, ranks[0], chosen(args.methods, list(methods))))

    def jobs(output: str, deadline: float) -> list[tuple[int, Any]]:
        job = Job(
            cells=cells,
            deterministic=args.deterministic,
            runtime=args.runtime,
            **of_jobs(args, output, deadline),
        )
        return [(ranks[0], job)]

    return Prepared(cells=cells, refusal=lambda cell: methods[cell.method].refusal(cell), jobs=jobs)


def _choice(args: argparse.Namespace, device: str, ranks: int, methods: tuple[str, ...]) -> Choice:
    heads = None
    if args.heads is not None or args.kv_heads is not None:
        queries = args.heads or max(32, args.kv_heads)
        heads = ((queries, args.kv_heads or queries),)
    require_kernel(args.kernel, device)
    return Choice(
        ranks=ranks,
        device=device,
        dtype=args.dtype or ("bfloat16" if device == "cuda" else "float32"),
        tokens=None if args.tokens is None else numbers("--tokens", args.tokens, tokens),
        heads=heads,
        head_dim=args.head_dim,
        masks=MASKS if args.mask == "all" else (args.mask,),
        methods=methods,
        globs=tuple(args.cells.split(",")),
    )


def _shown() -> Shown:
    from bmburst.bench.figure import draw
    from bmburst.bench.results import Results
    from bmburst.bench.table import markdown

    return Shown(Results, markdown, draw)


KIND = Kind(
    options=("runtime", "heads", "kv_heads", "head_dim", "mask", "deterministic"),
    defaults={"repeats": 9, "cell_seconds": 10.0, "cell_timeout": 300.0},
    prepare=_prepare,
    shown=_shown,
)
