"""A target without its body: embedding, head, final norm and the few layers that a drafter starts from.

A process that only trains needs no more of the target, and all of it would cost minutes and as much host memory as the
model is large. Its model is laid out without memory; the wanted tensors are read from its safetensors files one by one.
Where a source doesn't allow that (quantised weights, an adapter, other file formats or names) the whole is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from draftsmith.errors import TargetError
from draftsmith.records import FrozenEnds, TargetFacts
from draftsmith.target.anatomy import OTHER_TOWERS, Anatomy, find_anatomy, frozen_ends, layers_cut
from draftsmith.target.facts import facts_from_config
from draftsmith.target.model import (
    Target,
    TargetConfig,
    auto_class,
    load_config,
    load_target,
    load_tokenizer,
    locate,
    resolve_dtype,
)

logger = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FULL = "full_attention"
EXPERTS = ".experts."
"""In names of weights that files keep in another form than models do; no drafter starts from them."""


class UnreadableError(Exception):
    """Why a source can't be read in part."""


def load_light_target(config: TargetConfig, num_layers: Callable[[TargetFacts], int]) -> Target:
    """The target on the CPU with only what a drafter shares with it or starts from; the rest has no memory.

    Args:
        config: the target. Its attention kernel and device map don't matter here.
        num_layers: how many of its last full-attention layers are wanted, given its facts.

    Returns:
        A Target whose facts, tokenizer, ends, final norm and wanted layers are the whole target's; it can't be run.

    Raises:
        TargetError: as `load_target`.
    """
    try:
        return load_parts(config, num_layers)
    except UnreadableError as reason:
        logger.info("all of %s is loaded, though its ends would do: %s", config.target, reason)
    return load_target(config, "cpu")


def load_parts(config: TargetConfig, num_layers: Callable[[TargetFacts], int]) -> Target:
    """The same, or the reason why not.

    Raises:
        UnreadableError: this source has to be loaded whole.
        TargetError: as `load_target`.
    """
    from accelerate import init_empty_weights  # here, as transformers below: seconds that a plan does without

    if config.adapter:
        raise UnreadableError("an adapter may change any weight")
    source = locate(config)
    hf_config = load_config(config, source)
    if hf_config.to_dict().get("quantization_config"):
        raise UnreadableError("quantised weights have other names and forms than the model's")
    shards = Shards(source, config.revision or None)
    tokenizer = load_tokenizer(config, source, required=True)
    dtype = resolve_dtype(config.dtype, torch.device("cpu"))
    options: dict[str, Any] = {"trust_remote_code": True} if config.trust_remote_code else {}
    # Buffers (rotary frequencies, embedding scales) are computed for real: they are small and in no file.
    with init_empty_weights(include_buffers=False):
        model: Any = auto_class(hf_config, config.target).from_config(hf_config, dtype=dtype, **options)
    model.eval()
    facts = facts_from_config(
        model.config,
        tokenizer,
        name=config.target,
        generation_config=_generation_config(model, source, config.revision or None),
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
    )
    anatomy = find_anatomy(model, facts.num_layers)
    full = [layer for layer, kind in zip(anatomy.layers, facts.layer_types, strict=True) if kind == FULL]
    fill(model, anatomy, full[max(0, len(full) - num_layers(facts)) :], shards)
    model.requires_grad_(False)
    ends = prove_ends(model, anatomy)
    device = ends.embedding_VH.device
    return Target(model=model, facts=facts, anatomy=anatomy, device=device, maybe_tokenizer=tokenizer, _ends=ends)


def _generation_config(model: Any, source: str, revision: str | None) -> Any:
    """The one that comes with the weights, as loading them whole would take."""
    from transformers import GenerationConfig

    try:
        return cast(Any, GenerationConfig).from_pretrained(source, revision=revision)
    except OSError:
        return model.generation_config


class Shards:
    """A target's safetensors files: the name of every weight, and tensors read one by one."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._source, self._revision = source, revision
        self.file_of: dict[str, str]
        """The file of each weight, by its name there."""
        if (index := self._path(INDEX)) is not None:
            self.file_of = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        elif (path := self._path(WEIGHTS)) is not None:
            with cast(Any, safe_open)(path, framework="pt") as file:
                self.file_of = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            raise UnreadableError("it has no safetensors files")

    def _path(self, name: str) -> str | None:
        """Where a file lies, fetched from the hub where it must be; None where there is none."""
        from transformers.utils.hub import cached_file  # pyright: ignore[reportUnknownVariableType]

        try:
            return cached_file(self._source, name, revision=self._revision)
        except OSError:
            return None

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These weights, on the CPU."""
        found: dict[str, Tensor] = {}
        for shard in sorted({self.file_of[name] for name in names}):
            path = self._path(shard)
            if path is None:
                raise UnreadableError(f"its file {shard} is missing")
            with cast(Any, safe_open)(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in names if self.file_of[name] == shard}
        return found


def fill(model: Any, anatomy: Anatomy, layers: Sequence[nn.Module], shards: Shards) -> None:
    """Give memory and contents to embedding, head, final norm and `layers` of a model laid out without memory.

    Raises:
        UnreadableError: a weight that the files don't hold, or hold more than once.
    """
    name_of = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding not in name_of or head not in name_of:
        raise UnreadableError("it keeps its embedding or head in an unknown place")
    inner = _weights_of((embedding, anatomy.final_norm, *layers), name_of)
    outer = _weights_of((head,), name_of)
    prefix = name_of[anatomy.backbone]
    places = _inner_places(list(inner), prefix and f"{prefix}.", shards)
    tied = f"{name_of[head]}.weight"
    is_tied = tied in model.all_tied_weights_keys
    for name in outer:
        ending = name.removeprefix(name_of[head].rpartition(".")[0]).removeprefix(".")
        found = [key for key in shards.file_of if f".{key}".endswith(f".{ending}") and not _is_of_tower(key)]
        if is_tied and name == tied:
            if found:
                raise UnreadableError("its config ties embedding and head, but its files hold both")
        elif len(found) != 1:
            raise UnreadableError(f"its files hold {ending} {len(found)} times")
        else:
            places[name] = found[0]
    _put(model, inner | outer, places, shards)
    if is_tied:
        head.weight = embedding.weight


def _weights_of(modules: Sequence[nn.Module], name_of: Mapping[nn.Module, str]) -> dict[str, Tensor]:
    named = {f"{name_of[module]}.{name}": weight for module in modules for name, weight in module.named_parameters()}
    return {name: weight for name, weight in named.items() if EXPERTS not in name}


def _inner_places(names: Sequence[str], prefix: str, shards: Shards) -> dict[str, str]:
    """Where the files have weights of the backbone, which the model has under `prefix`: there or under one other."""
    if all(name in shards.file_of for name in names):
        return {name: name for name in names}
    ends = [name.removeprefix(prefix) for name in names]
    others = [key.removesuffix(ends[0]) for key in shards.file_of if f".{key}".endswith(f".{ends[0]}")]
    others = [other for other in others if all(other + end in shards.file_of for end in ends)]
    others = [other for other in others if not _is_of_tower(other)]
    if len(others) != 1:
        raise UnreadableError(f"its files hold its layers under {len(others)} names")
    return {name: others[0] + end for name, end in zip(names, ends, strict=True)}


def _is_of_tower(name: str) -> bool:
    return any(tower in name.lower() for tower in OTHER_TOWERS)


def _put(model: Any, weights: Mapping[str, Tensor], places: Mapping[str, str], shards: Shards) -> None:
    """Weights from the files in the place of those without memory, in their dtype."""
    found = shards.read(list(places.values()))
    for name, place in places.items():
        if found[place].shape != weights[name].shape:
            raise UnreadableError(f"{name} is {list(weights[name].shape)}, in its files {list(found[place].shape)}")
        parent, _, last = name.rpartition(".")
        # A copy: what safetensors gives may be the mapped file itself.
        tensor = found[place].to(dtype=weights[name].dtype, copy=True)
        setattr(model.get_submodule(parent), last, nn.Parameter(tensor, requires_grad=False))


def _passes(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    """A decoder layer that changes nothing."""
    return hidden_states


def prove_ends(model: Any, anatomy: Anatomy) -> FrozenEnds:
    """The ends, proved as `frozen_ends` does it, by a model of one layer that changes nothing.

    Raises:
        UnreadableError: this model's layers can't be left out, or its logits come about in another way.
    """
    first: Any = anatomy.layers[0]
    first.forward = _passes
    try:
        with layers_cut(anatomy, 1):
            return frozen_ends(model, anatomy)
    except (TargetError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UnreadableError(f"its ends can't be proved without its layers ({error})") from error
    finally:
        del first.forward
