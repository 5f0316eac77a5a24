"""Generation with a transformers model and a KV cache that is split over ranks by tokens.

Every rank holds all weights. Position p of a sequence is cached on rank `p % ranks`, so all ranks cache equally many
tokens. Prompts and further turns are split in the same way (layout "striped"), so each rank computes the tokens that it
caches. New tokens attend to each other as in training, and to the cache by passing queries from rank to rank.

Recurrent layers need neighbouring tokens on one rank. Their models are prefilled in "zigzag": attention moves its
queries, keys and values to "striped", and its output back. The states after the last token are on every rank, so a
decoding step of a recurrent layer needs no communication.

Of latent attention, the cache holds latents: see `transformers_latent`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, __version__, cache_utils

from bmburst.amounts import short_text, whole_number
from bmburst.attention.options import require_dense, require_numbers
from bmburst.comm.checks import contents, describe_tensors
from bmburst.comm.groups import single_rank_group
from bmburst.errors import UserError
from bmburst.inference.generation_fields import REFUSED, SPLIT_ARGUMENTS, SPLIT_GENERATE, has_effect
from bmburst.inference.relayout import Relayout
from bmburst.integrations.releases import LONGROPE, READ, require_release
from bmburst.integrations.transformers import SplitSequences
from bmburst.integrations.transformers_attention import NotSplit
from bmburst.integrations.transformers_cache_layers import Relay, SplitLayer, StateAndSplitLayer, StateLayer, no_beams
from bmburst.integrations.transformers_code import CACHES
from bmburst.integrations.transformers_latent import LatentLayer, caches_latents
from bmburst.integrations.transformers_models import require_rows, require_splittable
from bmburst.integrations.transformers_modules import Modules, models_in
from bmburst.integrations.transformers_recurrent import mixers, number_layers
from bmburst.integrations.transformers_rotary import by_length, one_length, own_frequencies
from bmburst.integrations.transformers_steps import Streamer, Together, cache_argument, split_steps, takes_positions
from bmburst.integrations.transformers_weights import EqualWeights
from bmburst.mesh import Mesh, require_mesh
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.layout import Layout, make_layout

_FIX = '\nfix: tokenizer(text, return_tensors="pt").input_ids'


class SplitCache(Cache):  # type: ignore[misc]
    """A KV cache whose tokens are split over the ranks of a sequence group.

    Args:
        config: The model's configuration.
        mesh: The ranks. `bmburst.Mesh.over_process_group()`.

    Raises:
        UserError: `config` is no configuration, or `mesh` is not a mesh or has tensor parallelism.
    """

    def __init__(self, config: Any, mesh: Mesh) -> None:
        require_mesh(mesh, "bmburst.Mesh.over_process_group(), after init_process_group", "transformers'")
        if not hasattr(config, "get_text_config"):
            got = type(config).__name__
            raise UserError(f"config must be a model's config, got {got}\nfix: SplitCache(model.config, mesh)")
        self.mesh = mesh
        split = CacheSplit.choose("tokens", mesh.sequence.size, mesh.sequence.rank, 1, 1)
        kind = LatentLayer if caches_latents(config) else SplitLayer
        super().__init__(layers=[_split_layer(each, mesh, split, kind) for each in DynamicCache(config=config).layers])
        self.has_split_states = any(isinstance(layer, cache_utils.LinearAttentionLayer) for layer in self.layers)
        """Whether there are states of recurrent layers, which continue over the ranks in a prefill."""
        self.alone = single_rank_group(mesh.sequence)
        """A group of this rank, for recurrent layers on tokens that all ranks have."""
        self.text: Tensor | None = None
        """The cached tokens of the last `generate`, `[batch, tokens]`."""
        self.layout = "zigzag"
        """The layout of a prefill with recurrent layers, "zigzag" or "contiguous"; the others are prefilled striped."""
        self.rotated_for = 0
        """Tokens of the text that the newest prefill was for, which may determine the rotary frequencies."""
        self.passed = 0
        """Tokens that the states have passed, if no layer has keys and values."""
        self.of_prompt = False
        """Whether the tokens that all ranks compute are of a prompt: transformers limits Mamba's dt there alone."""

    @property
    def is_compileable(self) -> bool:
        """Return False: transformers would compile the steps of a cache of states alone."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the cache on this rank."""
        of_tokens = sum(layer.nbytes for layer in self.split_layers if layer.is_initialized)
        return of_tokens + sum(state.nbytes for state in self._states)

    @property
    def _states(self) -> list[Tensor]:
        """The states of recurrent layers."""
        recurrent = [layer for layer in self.layers if isinstance(layer, cache_utils.LinearAttentionLayer)]
        kept = [each for layer in recurrent for each in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        return [each for each in kept if each is not None]

    @property
    def split_layers(self) -> list[SplitLayer]:
        """The layers of the cache that have keys and values."""
        return [layer for layer in self.layers if isinstance(layer, SplitLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens of a sequence, over all ranks."""
        return int(super().get_seq_length(layer_idx)) if self.split_layers else self.passed

    def reset(self) -> None:
        """Drop all tokens."""
        super().reset()
        self.passed = 0

    def crop(self, max_length: int) -> None:
        """Drop the tokens from `max_length` on; below 0, as many of the last tokens, as in transformers.

        Raises:
            UserError: It is no whole number from minus the cached tokens on, or tokens are to be dropped and there are
                states of recurrent layers, which cannot go back.
        """
        cached = self.get_seq_length()
        kept = whole_number("max_length", max_length, -cached)
        kept += cached if kept < 0 else 0
        if self.has_split_states and kept < cached:
            raise UserError(
                f"states of recurrent layers cannot go back from {cached} tokens to {kept}\n"
                "fix: a new cache, and the whole text"
            )
        for layer in self.split_layers:
            layer.crop(kept)

    def require_behind(self, input_ids: Tensor) -> None:
        """Check that `input_ids`, `[batch, tokens]`, is the cached text with new tokens behind it.

        Raises:
            UserError: It is shorter, of another number of texts, or of another text.
        """
        length = self.get_seq_length()
        whole = "fix: pass the whole text, all turns before and the new prompt behind them, or a new cache"
        if length >= input_ids.shape[1]:
            raise UserError(f"the cache holds {length} tokens, but input_ids has {input_ids.shape[1]}\n{whole}")
        kept = [layer.keys for layer in self.split_layers if layer.is_initialized] + self._states
        kept += [] if self.text is None else [self.text]  # of a model without layers
        batch = len(kept[0]) if length and kept else len(input_ids)
        if batch != len(input_ids):
            raise UserError(f"the cache holds {batch} texts, but input_ids has {len(input_ids)}\n{whole}")
        if self.text is None or self.text.shape[1] != length:  # filled otherwise than by `generate`
            return
        differing = (self.text != input_ids[:, :length].to(self.text.device)).any(0).nonzero()
        if len(differing):
            raise UserError(f"input_ids differs from the cached text at token {int(differing[0])}\n{whole}")

    @torch.no_grad()
    def prefill(self, model: PreTrainedModel, input_ids: Tensor, *, length: int | None = None) -> None:
        """Append a prompt or a further turn, `[batch, tokens]`, with its tokens split over the ranks.

        The split part begins at a multiple of the number of ranks. Every rank computes the few tokens before it.

        Args:
            model: See `generate`.
            input_ids: The new tokens, `[batch, tokens]`.
            length: Tokens of the whole text, if more will follow at once. Rotary frequencies of types "dynamic" and
                "longrope" depend on it. Default: the cached and the new tokens.

        Raises:
            UserError: As in `SplitSequences.part`, or the model is not exact on split sequences.
        """

        def decide() -> tuple[None, str]:
            _require_tokens(input_ids)
            if not isinstance(model, PreTrainedModel):
                raise UserError(f"{type(model).__name__} is no model of transformers\nfix: AutoModelForCausalLM")
            return None, "SplitCache.prefill"

        self.mesh.sequence.decided(decide)
        whole = self.get_seq_length() + input_ids.shape[1] if length is None else length
        self.rotated_for = whole
        number_layers(model)
        with one_length(model, whole):
            early = -self.get_seq_length() % self.mesh.sequence.size
            if input_ids.shape[1] - early < self.mesh.sequence.size:
                early = input_ids.shape[1]
            if early:
                self._run(model, input_ids[:, :early])
            if early < input_ids.shape[1]:
                self._run_split(model, input_ids[:, early:], whole)

    def _run_split(self, model: PreTrainedModel, input_ids: Tensor, whole: int) -> None:
        """Run the model on this rank's part of the tokens, of a text of `whole` tokens."""
        layout = self.layout if self.has_split_states else "striped"
        part = SplitSequences(self.mesh, layout=layout).part(input_ids, position_ids=self._positions(input_ids))
        start = self.get_seq_length()

        def decide() -> tuple[None, str]:
            require_splittable(model, lambda: (whole,))
            require_rows(model, part.largest)
            return None, "SplitCache.prefill"

        self.mesh.sequence.decided(decide)
        relay = _relay(part.cut.layout, self.mesh) if self.has_split_states else None
        for layer in self.split_layers:
            layer.prefilling, layer.relay = input_ids.shape[1], relay
        try:
            self._call(model, part.input_ids, part.mask.behind(start), part.position_ids)
        finally:
            for layer in self.split_layers:
                layer.prefilling = layer.relay = None
        self.passed += input_ids.shape[1]

    def _run(self, model: PreTrainedModel, input_ids: Tensor) -> None:
        """Run the model on the same tokens on every rank, with the split cache."""
        ones = torch.ones(len(input_ids), self.get_seq_length() + input_ids.shape[1], device=input_ids.device).long()
        self.of_prompt = True
        # Bamba counts positions from 0 without them, whatever is cached.
        self._call(model, input_ids, ones if self.split_layers else None, self._positions(input_ids))
        self.passed += input_ids.shape[1]

    def _call(self, model: PreTrainedModel, input_ids: Tensor, mask: Any, positions: Tensor) -> None:
        """Run the model without its head; it makes no cache of its own."""
        base = model.base_model
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        base(**inputs, **{cache_argument(base): self})

    def _positions(self, input_ids: Tensor) -> Tensor:
        """Return the positions of the tokens behind the cached ones, `[1, tokens]`."""
        new = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return new + int(self.get_seq_length())


def _split_layer(layer: Any, mesh: Mesh, split: CacheSplit, kind: type[SplitLayer]) -> Any:
    """Return the layer of a split cache for one of transformers' own cache; `kind` is that of attention alone."""
    has_state = isinstance(layer, cache_utils.LinearAttentionLayer)
    if has_state and layer.number_of_states > 1:
        raise UserError(f"a layer with {layer.number_of_states} states is not known\nfix: model.generate on one rank")
    if isinstance(layer, cache_utils.CacheLayerMixin):
        return StateAndSplitLayer(mesh, split) if has_state else kind(mesh, split)
    return StateLayer() if has_state else layer  # a layer without tokens


def _relay(source: Layout, mesh: Mesh) -> Relay:
    """Return the way from the layout of a prefill to that of the cache."""
    target = make_layout("striped", source.size, source.tokens)
    comm = mesh.sequence
    return Relay("striped", Relayout.between(source, target, comm), Relayout.between(target, source, comm))


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    mesh: Mesh,
    past_key_values: SplitCache | None = None,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Call `model.generate` with a prompt and a KV cache that are split over ranks. All ranks pass the same arguments.

    All ranks return the tokens of rank 0, and end where it ends: also with `max_time`, with criteria or processors of
    your own, and where logits of two ranks differ in the last bit. An exception that a streamer, criterion or processor
    raises on one rank ends `generate` on all of them.

    Args:
        model: A causal LM of transformers with attn_implementation="bmburst".
        input_ids: The whole prompt with all earlier turns, `[batch, tokens]`.
        mesh: The ranks.
        past_key_values: The cache of the earlier turns. Default: a new cache.
        attention_mask: Must be all ones, if given.
        seed: Seed of sampling; all ranks draw the same numbers.
        options: Further arguments of `model.generate`: those of `SPLIT_ARGUMENTS` and `SPLIT_GENERATE` in
            `bmburst.inference.generation_fields`. A `streamer` may be on one rank alone.

    Returns:
        The result of `model.generate`, the same on every rank.

    Raises:
        UserError: The model or an argument is not supported, the prompt is padded, it does not begin with the cached
            text, the options or the model's generation_config ask for something that is not read here, or ranks have
            different arguments; or see `Together.step`.
    """
    require_mesh(mesh, "bmburst.Mesh.over_process_group(), after init_process_group", "transformers'")

    def decide() -> tuple[SplitCache, str]:
        _require_ids(model, input_ids)
        cache = SplitCache(model.config, mesh) if past_key_values is None else past_key_values
        if not isinstance(cache, SplitCache):
            raise UserError(f"past_key_values is a {type(cache).__name__}\nfix: SplitCache(model.config, mesh)")
        if mixers(model) and not cache.has_split_states:
            raise UserError(
                f"the cache of transformers {__version__} has no states for the recurrent layers of "
                f"{model.config.model_type}\nfix: {READ}, or model.generate on one rank"
            )
        if any(rotary.kind == "longrope" for rotary in by_length(Modules(model))):
            require_release(LONGROPE, "generate with rope type 'longrope' over ranks")
        inner = models_in(model)[0]
        if mixers(model) and not cache.split_layers and takes_positions(inner):
            raise UserError(
                f"{type(inner).__name__} cannot generate without a layer of attention, also in transformers\n"
                "fix: a layer of attention in layer_types"
            )
        cache.require_behind(input_ids)
        if attention_mask is not None:
            shape = list(input_ids.shape)
            if not isinstance(attention_mask, Tensor) or list(attention_mask.shape) != shape:
                raise UserError(f"attention_mask must be a tensor {shape} as input_ids is\nfix: leave it out")
            require_dense("attention_mask", attention_mask)
            require_numbers("attention_mask", attention_mask)
            if not bool((attention_mask == 1).all()):
                raise UserError("attention_mask has padding\nfix: generate from prompts of one length at a time")
        _require_options(model, options)
        if options.get("synced_gpus") and cache.has_split_states:
            raise UserError(
                "synced_gpus goes on after the end of a text, and states of recurrent layers cannot go back\n"
                "fix: leave it out; each group of ranks needs all weights"
            )
        told = [f"{name} {_plain(value)}" for name, value in sorted(options.items()) if name != "streamer"]
        told += [] if "generation_config" in options else [f"generation_config {_plain(model.generation_config)}"]
        seeded = f"seed {whole_number('seed', seed, 0)}"
        if seed >= 2**64:
            raise UserError(f"seed must be below 2**64, got {short_text(seed)}\nfix: pass a smaller one")
        ids = f"input_ids {describe_tensors(input_ids)} {contents(input_ids)}"
        return cache, "\n".join(("generate", seeded, ids, f"cached {cache.get_seq_length()}", *told))

    with mesh.sequence.checking():
        cache = mesh.sequence.decided(decide)
    input_ids, inner = input_ids.to(mesh.sequence.device), models_in(model)[0]
    with mesh.sequence.first_calls("generate") as is_first, torch.no_grad():
        if is_first and mesh.sequence.size > 1:
            EqualWeights().compare(inner, mesh.sequence)
    if not cache.get_seq_length():
        _require_cacheable(inner, mesh, input_ids[:, :1])
    together = Together(mesh.sequence)
    given: dict[str, Any] = {"use_cache": True} | options | {"cache_implementation": None}  # that of a whole cache
    if given.get("streamer") is not None:
        given["streamer"] = Streamer(given["streamer"], together)
    devices = [mesh.sequence.device] if mesh.sequence.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        own_frequencies(model, mesh.sequence.device),
        split_steps(inner, cache, together, input_ids.shape[1]),
    ):
        torch.manual_seed(seed)
        mask = torch.ones_like(input_ids)
        found = model.generate(input_ids, attention_mask=mask, **{cache_argument(inner): cache}, **given)
    together.finish()
    text = found if isinstance(found, Tensor) else found.sequences
    cache.crop(text.shape[1] - 1)  # with synced_gpus, later steps have computed the last token at other positions
    cache.text = text[:, : cache.get_seq_length()].clone()
    return found


def _require_tokens(input_ids: object) -> None:
    """Check the type, the shape and the dtype of token ids; the host does not wait for them."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        got = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise UserError(f"input_ids must be a tensor [batch, tokens] with at least one token, got {got}{_FIX}")
    require_dense("input_ids", input_ids)
    require_numbers("input_ids", input_ids)
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"input_ids must be token ids, int64 or int32, got {input_ids.dtype}{_FIX}")


def _require_ids(model: PreTrainedModel, input_ids: Tensor) -> None:
    _require_tokens(input_ids)
    if int(input_ids.min()) < 0:
        raise UserError(f"input_ids must be token ids of at least 0, got {input_ids.min()}{_FIX}")
    require_splittable(model, lambda: (input_ids.shape[1],))
    if getattr(model, "generation_config", None) is None:
        raise UserError(f"{type(model).__name__} has no head to generate with\nfix: AutoModelForCausalLM")
    require_rows(model, int(input_ids.max()))


@torch.no_grad()
def _require_cacheable(model: PreTrainedModel, mesh: Mesh, token: Tensor) -> None:
    """Decode one token, `[batch, 1]`, with a cache of this rank, and refuse a model for which that is not possible."""
    number_layers(model)
    cache = SplitCache(model.config, mesh)
    for layer in cache.split_layers:
        layer.split = CacheSplit.choose("tokens", 1, 0, 1, 1)  # no communication, which might fail for other reasons
    try:
        cache._run(model, token)
    except (RuntimeError, ValueError) as error:  # what is cached has another layout, or is changed later
        if isinstance(error, UserError) and not isinstance(error, NotSplit):
            raise
        raise UserError(
            f"{type(model).__name__} computes with keys or values after it has cached them, which a split cache does "
            'not allow\nfix: model.set_attn_implementation("eager"), and model.generate: a whole cache on each rank'
        ) from error


def _require_options(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Refuse what is not known to be right with a split cache, in the options and the generation_config.

    A field of the configuration that the installed transformers does not have changes nothing there.
    """
    config = options.get("generation_config")
    config = model.generation_config if config is None else config
    if not isinstance(config, GenerationConfig):
        raise UserError(
            f"generation_config must be transformers' GenerationConfig, got {type(config).__name__}\n"
            "fix: leave it out, or GenerationConfig(...)"
        )
    for name in (each for each in CACHES if each in options):
        raise UserError(f"{name} is given\nfix: past_key_values=SplitCache(model.config, mesh), as it is named here")
    for name in sorted(set(options) - set(SPLIT_ARGUMENTS) - set(SPLIT_GENERATE)):
        if options[name] is not None:
            raise _not_possible(name, options[name], "leave it out")
    defaults = model.generation_config  # transformers takes from it what `config` leaves open
    for name in GenerationConfig().to_dict():
        stored = [value for each in (config, defaults) if (value := getattr(each, name, None)) is not None]
        value = next(iter(stored), None) if name not in options else options[name]
        if name == "use_cache" and name not in options:  # set by `generate`
            continue
        if has_effect(name, value) and SPLIT_GENERATE.get(name, REFUSED) == REFUSED:
            if name in ("num_beams", "num_return_sequences"):
                raise no_beams()
            unset = "leave it out" if name in options else f"generation_config.{name} = None"
            raise _not_possible(name, value, unset)


def _not_possible(name: str, value: object, unset: str) -> UserError:
    got = f"{name}={value!r}" if isinstance(value, int | float | str) else name
    return UserError(
        f"{got} is not possible with a split cache\n"
        f'fix: {unset}, or model.set_attn_implementation("sdpa") and model.generate'
    )


def _plain(value: object) -> str:
    """Return a value as text if that is equal on all ranks, else its type."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    is_plain = isinstance(value, int | float | str | GenerationConfig | None)
    return repr(value) if is_plain else type(value).__name__
