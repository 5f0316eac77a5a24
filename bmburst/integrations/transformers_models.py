"""Checks that a transformers model is exact on a split sequence, and sets its activation checkpointing."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer

from bmburst.errors import UserError
from bmburst.integrations.releases import READ
from bmburst.integrations.transformers_adapters import require_adapters
from bmburst.integrations.transformers_attention import NAME
from bmburst.integrations.transformers_latent import attach_latents
from bmburst.integrations.transformers_layers import (
    attach_attention,
    calls_registry,
    changed_attention,
)
from bmburst.integrations.transformers_modules import Modules, models_in, outermost
from bmburst.integrations.transformers_recurrent import LAYER_TYPES, attach, is_read, mixers_of, unread
from bmburst.integrations.transformers_rotary import require_one_frequency
from bmburst.recompute import checkpoint
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import Policy

_ELSEWHERE = {
    **{name: f"pass the whole batch's {name} to split.part" for name in ("input_ids", "labels", "position_ids")},
    "attention_mask": "pass the whole batch's attention_mask to split.part",
    "inputs_embeds": "a forward hook on model.get_input_embeddings() that returns part.cut.take(inputs_embeds)",
    "num_items_in_batch": "part.loss(model, valid=split.valid(*parts)), of all parts of the step",
}
"""Arguments of a model that a part replaces, and what to do instead."""
_ATTENTION = frozenset({"attention", "chunked_attention", "full_attention", "sliding_attention"})
"""Types of layers that mix tokens only in attention."""
_RELEASE = f"{READ}, or another model"
_DRAWS = ("dropout", "jitter", "pdrop")
"""Parts of the names of rates above 0 with which layers draw random numbers: for dropout, or as noise of a router."""
_OF_CLASSIFIERS = ("classifier_", "summary_")
"""How rates begin that only models for classification use; GPT-NeoX has one by default."""
_COUNTS_TOKENS = frozenset({"opt"})
"""Types that count positions in the attention_mask, so that those of a sample begin behind its padding."""
_TABLE, _MARK = "ATTENTION_CLASSES", "refuses_own_tables"
_KNOWN = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bmburst", "bmburst_ops", "bitsandbytes", "torchao", "fla"}
    | {"lightning", "lightning_fabric", "trl"}
)
"""Packages whose modules and hooks are checked by name, or change each token alone."""
_WRAPPERS = 32
"""How many wrappers of a function are looked at."""


def require_splittable(
    model: torch.nn.Module, ends: Callable[[], tuple[int, ...]], *, of_rows: bool = False, routed: bool = False
) -> Modules:
    """Check that a model mixes tokens only in bmburst's attention.

    Every call of a model is checked: its configuration, modules and functions may have changed since the last one.

    Args:
        model: A model of transformers, also wrapped by DDP, FSDP2, PEFT or torch.compile.
        ends: Returns the largest position id + 1 of each rank; called only if the model depends on it.
        of_rows: Whether the ends are those of rows that a tree shares with others.
        routed: Whether the caller adds up the router's loss.

    Returns:
        The modules of the model.

    Raises:
        UserError: It is not a model of transformers, uses another attention, mixes tokens elsewhere, or has adapters,
            losses or rotary frequencies that depend on the tokens of a rank.
    """
    modules = Modules(model)
    parts: list[PreTrainedModel] = modules.of(PreTrainedModel)
    if not parts:
        raise UserError(
            f"{type(model).__name__} contains no model of transformers\nfix: give a PreTrainedModel, wrapped or not"
        )
    is_text = all(part.main_input_name == "input_ids" for part in parts)
    of_media = set() if is_text else _other_media(parts[0])
    for part in (part for part in parts if id(part) not in of_media):
        if (problem := _problem(part, modules, routed)) is not None:
            raise UserError(f"{type(part).__name__} is not exact on a split sequence: {problem[0]}\nfix: {problem[1]}")
    if _is_tensor_parallel(modules, parts):
        raise UserError(
            f"{type(parts[0]).__name__} is not exact on a split sequence: it is tensor parallel, so ranks add up their "
            "results, but they have different tokens\nfix: leave tp_plan, tp_size and parallelize_module out; FSDP2 "
            "shards weights"
        )
    require_adapters(modules)
    require_one_frequency(modules, ends, of_rows=of_rows)
    _note_others_code(modules)
    return modules


def _note_others_code(modules: Modules) -> None:
    """Warn, once, of code of a model's own or of the caller's: classes, a `forward` that was replaced, and hooks.

    They are exact if they change each token alone. Code that reads other tokens, such as a shift by one token, a sum
    over tokens or an attention of its own, would see those of a rank only.
    """
    owners = {owner for kind in modules.kinds for owner in kind.__mro__}
    others = {owner for owner in owners if _of_others(vars(owner).get("forward"))}
    others |= {type(module) for module in modules.with_own("forward") if _of_others(module.forward)}
    hooks = {_name(hook) for hook in modules.hooks() if _of_others(hook)}
    if not (others or hooks) or (dist.is_initialized() and dist.get_rank()):
        return
    _warn_of_code(tuple(sorted(map(_name, others))), tuple(sorted(hooks)))


@lru_cache(maxsize=64)  # Python forgets what it has warned of whenever a program changes its filters
def _warn_of_code(owners: tuple[str, ...], hooks: tuple[str, ...]) -> None:
    told = " and ".join(_listed(what, names) for what, names in (("forward of", owners), ("hook", hooks)) if names)
    warnings.warn(
        f"{told} is not code of transformers: on split sequences it must change each "
        "token alone, or get other tokens by attention of transformers' registry. Compare the logits once with those "
        "of one process: docs/hugging_face.md, check_hugging_face.py",
        stacklevel=3,
    )


def _listed(what: str, names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}"


def _name(code: Any) -> str:
    """Return the name of a class, function or object that can be called, with that of its module."""
    code = code.func if isinstance(code, partial) else code
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__.rpartition('.')[2]}.{named.__qualname__}"


def _of_others(function: object) -> bool:
    """Return whether a function, or one that it wraps, is defined outside of the packages that are known.

    `functools.wraps` gives a wrapper the name of the wrapped function's module, but not its globals.
    """
    for _ in range(_WRAPPERS):
        if isinstance(function, partial):
            function = function.func
            continue
        if function is None:
            break
        module = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
        package = (module or "torch").partition(".")[0]
        if package not in _KNOWN and package not in sys.stdlib_module_names:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def require_rows(model: torch.nn.Module, largest: int | None) -> None:
    """Raise UserError unless a model's embedding has a row for each token id. A GPU kernel's error would not name it.

    Args:
        model: A model that has passed `require_splittable`.
        largest: The largest id; None skips the check.
    """
    try:  # the weight's shape may have changed by sharding
        whole = outermost(model)
        rows = None if whole is None else getattr(whole.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # the model does not define its input embeddings
        rows = None
    if largest is not None and rows is not None and largest >= rows:
        raise UserError(
            f"the batch has token id {largest}, but the model's vocabulary has {rows}\nallowed: 0 to {rows - 1}\n"
            "fix: use the tokenizer that the model was made for, or model.resize_token_embeddings"
        )


def require_next_token_loss(model: torch.nn.Module) -> None:
    """Check that a model's own loss is that of the next token, which `Part.loss` computes.

    Raises:
        UserError: It is another loss, such as that of a classification, or one that the caller has set.
    """
    whole = outermost(model)
    if getattr(whole, "_loss_function", ForCausalLMLoss) is not ForCausalLMLoss:
        raise UserError(
            f"loss_function of {type(whole).__name__} was set, but the loss of a split sequence is the next token's"
            "\nfix: leave it out; or a loss of your own from part.logps(model) or part.logits(model)"
        )
    kind = getattr(whole, "loss_type", None)
    if kind is not None and LOSS_MAPPING.get(kind) is not ForCausalLMLoss:
        raise UserError(
            f"the loss of {type(whole).__name__} is {kind}, but that of a split sequence is the next token's\n"
            "fix: AutoModelForCausalLM; if the loss is a sum over tokens, your own loss of part.logits(model)"
        )


def refuse_other_tables() -> None:
    """Patch transformers, once, to refuse NAME for model types with their own table of attention classes.

    Otherwise the construction of such a model, for example Falcon or GPT-Neo, would fail with a KeyError.
    """
    chosen = PreTrainedModel.get_correct_attn_implementation
    if getattr(chosen, _MARK, False):
        return

    @wraps(chosen)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any) -> Any:
        if requested_attention == NAME:
            attach(type(self))
            attach_attention(type(self))
            attach_latents(type(self))
        if requested_attention == NAME and (table := _own_table(self)) is not None:
            raise UserError(
                f"model type '{self.config.model_type}' has a table of attention classes of its own ({table}) and does "
                "not use transformers' AttentionInterface\n"
                "fix: another model type, such as those that docs/families.md lists"
            )
        return chosen(self, requested_attention, *args, **options)

    setattr(checked, _MARK, True)
    PreTrainedModel.get_correct_attn_implementation = checked


def _own_table(model: PreTrainedModel) -> str | None:
    """Return the name of the table of attention classes in a model's module, if there is one and it lacks NAME."""
    values = vars(sys.modules[type(model).__module__])
    tables = (name for name, value in values.items() if name.endswith(_TABLE) and isinstance(value, dict))
    return next((name for name in tables if "eager" in values[name] and NAME not in values[name]), None)


def _is_tensor_parallel(modules: Modules, parts: list[PreTrainedModel]) -> bool:
    """Return whether the ranks hold parts of matrices, and no rank gathers them: a plan of transformers or of torch.

    FSDP2 gathers weights. With it, parts of matrices are on a dimension of the device mesh that is called "tp".
    """
    if any((getattr(part, "_tp_size", None) or 1) > 1 for part in parts):
        return True
    weights = modules.weights()
    kinds = tuple(kind for kind in set(map(type, weights)) if issubclass(kind, DTensor))
    meshes = {weight.device_mesh for weight in weights if type(weight) in kinds} if kinds else set()
    is_gathered = bool(modules.of(FSDPModule))
    return any(mesh.size() > 1 and not (is_gathered and "tp" not in (mesh.mesh_dim_names or ())) for mesh in meshes)


def _other_media(model: PreTrainedModel) -> set[int]:
    """Return the ids of the modules in a model that read images or sounds: text does not reach them."""
    inner = (part for part in models_in(model)[1:] if part.main_input_name != "input_ids")
    return {id(module) for part in inner for module in Modules(part).every}


def _problem(model: PreTrainedModel, modules: Modules, routed: bool) -> tuple[str, str] | None:
    """Return why a model, or a part of one, is not exact on split sequences, and the fix; None if it is exact.

    Args:
        model: The model or part.
        modules: Those of the whole model.
        routed: See `require_splittable`.
    """
    own = modules.inside(model)
    config, another = model.config, "use another model"
    chosen, was_read = config._attn_implementation, is_read(model)
    if was_read and (changed := unread(type(model))) is not None:
        return f"its recurrent layer is not the one that was read: {changed}", _RELEASE
    if (changed := changed_attention(model)) is not None:
        return f"its attention is not the one that was read: {changed}", _RELEASE
    uses_registry = was_read or model._supports_attention_backend or calls_registry(model)
    if not uses_registry:
        return "it does not say that it calls attention through transformers' registry", another
    if chosen != NAME:
        return f"its attention is {chosen!r}", f'register(), then from_pretrained(..., attn_implementation="{NAME}")'
    known = _ATTENTION | LAYER_TYPES if was_read else _ATTENTION
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        return f"it has layers of type {others[0]!r}", another
    recurrent = own(mixers_of(modules))
    if getattr(model, "_is_stateful", False) and not (recurrent or was_read):
        return "its layers carry a state from token to token", another
    if recurrent and getattr(model, "use_kernels", False):
        return "kernels of a hub may replace its recurrent layers", "use_kernels=False"
    if getattr(config, "alibi", False):
        return "its attention has a bias by distance (alibi)", another
    if own(modules.having("create_position_ids_from_input_ids")):
        return "its positions begin behind the id of padding, and depend on where padding is", another
    if convolutions := own(modules.of(nn.Conv1d)):
        inside = {id(module) for mixer in recurrent for module in mixer.modules()}
        wrapped = (each for each in own(modules.having("get_base_layer")) if id(each) in inside)
        adapted = next((each for each in wrapped if isinstance(each.get_base_layer(), nn.Conv1d)), None)
        if adapted is not None:
            problem = f"the adapter of its convolution {_path(model, adapted)} would have no effect: its weight is read"
            return problem, "leave the convolution out of what adapters target; modules_to_save trains it"
        inside |= _other_media(model)
        mixing = next((module for module in convolutions if id(module) not in inside), None)
        if mixing is not None:
            return f"its convolution {_path(model, mixing)} reads neighbouring tokens", another
    if any(module.training and module.layerdrop for module in own(modules.having("layerdrop"))):
        return "ranks would skip different layers at random, and wait for each other", "layerdrop=0.0 in its config"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "its chunk_size_feed_forward divides the tokens of a rank", "config.chunk_size_feed_forward = 0"
    if getattr(config, "output_router_logits", False) and not routed:
        return "its router's loss is no sum over tokens", "config.output_router_logits = False"
    return None


def _path(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module in a model."""
    found: str = next(name for name, module in model.named_modules() if module is wanted)
    return found


def recompute(model: torch.nn.Module, policy: str | Policy = "block-keep-attention") -> None:
    """Set activation checkpointing of a model's layers with a recompute policy of bmburst.

    Use it instead of `gradient_checkpointing_enable`, which would run attention's communication a second time.

    Args:
        model: A model of transformers, before or after it is wrapped.
        policy: A policy of `bmburst.recompute.policy`. The layout must support a fraction of attention, as in
            "block-keep-attention:0.5". "block-keep-attention+first-20" applies to the first 20 layers, in the order of
            `model.modules()`.

    Raises:
        UserError: The policy is unknown or names too many layers, or the model has no layers that support gradient
            checkpointing, or has dropout or noise, for which recomputation would draw other random numbers.
    """
    chosen = Policy.parse(policy)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no transformers layers that support gradient checkpointing\n"
            "fix: give a PreTrainedModel, wrapped or not, of a family that supports it"
        )
    noise = _noise(model)
    if noise is not None:
        raise UserError(
            f"recomputed layers would draw other random numbers: the model has {noise}\n"
            "fix: set it to 0, or model.gradient_checkpointing_enable()"
        )
    if chosen.every > 1 or chosen.offloads_mlp:
        possible = replace(chosen, every=1, offloads_mlp=0).name
        raise UserError(f"recompute policy '{chosen.name}' is for bmburst's own models\nfix: {possible}")
    store = HostStore()
    for layer, own in zip(layers, chosen.of_layers(len(layers)), strict=True):
        layer._gradient_checkpointing_func = partial(checkpoint, own, store=store)
        layer.gradient_checkpointing = True


def _noise(model: torch.nn.Module) -> str | None:
    """Return the name and rate of an active dropout, or of noise of a router, in a module or configuration; or None."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} of {module.p:g}"
        rates = _rates(module.config.to_dict()) if isinstance(module, PreTrainedModel) else ()
        for key, value in rates:
            return f"{key} of {value:g}"
    return None


def _rates(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the keys of a configuration, and of those inside of it, whose value above 0 makes layers draw numbers."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _rates(value)
        elif isinstance(value, float) and value > 0 and _is_drawn(key):
            yield key, value


def _is_drawn(key: str) -> bool:
    return any(part in key for part in _DRAWS) and not key.startswith(_OF_CLASSIFIERS)


def positions_of(model: nn.Module, positions: Tensor, before: Tensor | None) -> Tensor:
    """Return the positions that a model gives to a rank's tokens.

    Args:
        model: A model that has passed `require_splittable`.
        positions: Positions in the samples, `[batch, local_tokens]`.
        before: Tokens of padding before each sample that the positions count, `[batch, 1]`; None: none.
    """
    if before is None or not any(part.config.model_type in _COUNTS_TOKENS for part in models_in(model)):
        return positions
    return (positions - before).clamp(min=0)


def require_inputs(inputs: Mapping[str, object]) -> None:
    """Raise UserError unless arguments of a model are none of those that a split batch has."""
    for name in (each for each in _ELSEWHERE if each in inputs):
        raise UserError(f"{name} is given with a split batch, which has its own\nfix: {_ELSEWHERE[name]}")


def require_tokens(model: nn.Module, logits: Tensor, shape: torch.Size) -> None:
    """Check that logits are those of a rank's tokens: a model that pools tokens would pool those of a rank.

    Raises:
        UserError: They have another shape than `[batch, local_tokens, classes]`; `shape` is `[batch, local_tokens]`.
    """
    batch, tokens = shape
    if logits.dim() != 3 or logits.shape[:2] != shape:
        raise UserError(
            f"{type(model).__name__} returns logits {list(logits.shape)}, not one for each token of this rank\n"
            f"allowed: [{batch}, {tokens}, classes]; a result of the whole sequence needs tokens of other ranks\n"
            "fix: AutoModelForCausalLM, without logits_to_keep"
        )
