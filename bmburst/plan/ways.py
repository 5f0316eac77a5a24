"""Enumerates the ways to train a task: meshes, attention strategies, recompute policies and ZeRO stages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bmburst.errors import UserError
from bmburst.plan.candidates import RECOMPUTE, ZERO, Candidate, Task
from bmburst.recompute.policy import Policy
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.parallelism import STRATEGIES, can_share, divisors
from bmburst.schedule.strategy import choose_strategy, possible_strategies


def candidates(
    task: Task, *, recompute: Sequence[str] = RECOMPUTE, zero: Sequence[int] = ZERO, tensor: Sequence[int] | None = None
) -> list[Candidate]:
    """Return every sensible candidate.

    Args:
        task: The training task.
        recompute: Recompute policies to try.
        zero: ZeRO stages to try.
        tensor: Tensor parallel degrees to try; by default all that fit in a node.

    Raises:
        UserError: There is no candidate, or a policy is unknown or names too many layers.
    """
    for policy in recompute:
        Policy.parse(policy).require_layers(task.model.num_layers)
    found = [
        replace(each, recompute=policy, zero=stage)
        for data, degree in _meshes(task, tensor)
        for each in _attention_candidates(task, data, degree)
        for policy, stage in product(recompute, zero)
    ]
    if not found:
        raise _none(task, tensor)
    return found


def _meshes(task: Task, tensor: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    model, passes = task.model, task.batch // task.micro_batch
    for degree in divisors(task.gpus_per_node):
        wanted = tensor is None or degree in tensor
        if not wanted or model.intermediate_size % degree:
            continue
        if not can_share(degree, model.num_heads, model.num_kv_heads):
            continue
        if degree > 1 and not model.shares_matrices:
            continue
        rest = task.gpus // degree
        for data in divisors(passes):
            if rest % data == 0 and rest // data <= task.sequence:
                yield data, degree


def _attention_candidates(task: Task, data: int, tensor: int) -> Iterator[Candidate]:
    """Yield a candidate for each attention strategy that a mesh can run."""
    one = Candidate(task=task, data=data, tensor=tensor, ulysses_degree=1, outer="ring")
    _, mask, _ = one.pattern
    for strategy in possible_strategies(STRATEGIES["auto"], one.shapes, mask, one.placement):
        yield one.with_strategy(strategy.ulysses_degree, strategy.outer)


def with_attention_choice(
    candidate: Candidate, strategy: str, ulysses_degree: int | None, hardware: Hardware
) -> Candidate:
    """Return a candidate with the attention strategy that `burst_attention` selects on its mesh.

    Args:
        candidate: The candidate; its strategy is ignored.
        strategy: One of `bmburst.schedule.parallelism.STRATEGIES`.
        ulysses_degree: Ulysses degree; None for the fastest degree.
        hardware: The machine for which "auto" selects the fastest strategy.
    """
    asked = candidate.problem(hardware)
    try:
        chosen = choose_strategy(
            strategy, asked.shapes, asked.length, asked.mask, asked.placement, hardware, ulysses_degree
        )
    except UserError:  # burst_attention will refuse it
        return candidate.with_strategy(1, "ring")
    return replace(candidate.with_strategy(chosen.ulysses_degree, chosen.outer), ring_tensors=chosen.ring_tensors)


def _none(task: Task, tensor: Sequence[int] | None) -> UserError:
    if tensor is not None and not any(True for _ in _meshes(task, None)):
        tensor = None
    if tensor is not None:
        return UserError(
            f"--tensor {','.join(map(str, tensor))}: no such degree divides this model over "
            f"{task.gpus_per_node} GPUs a node\n"
            "fix: divisors of the GPUs a node that divide the attention heads and intermediate_size"
        )
    return UserError(
        f"--seq {task.sequence} with --batch {task.batch} leaves some of {task.gpus} GPUs without a token\n"
        "fix: a longer --seq, a larger --batch or fewer --gpus"
    )
