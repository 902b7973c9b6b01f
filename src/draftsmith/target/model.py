"""The target: a frozen Hugging Face causal LM with what capture, drafter and evaluation need to know of it.

transformers is imported in the functions that use it: it takes seconds, and most commands first check their flags, or
only plan.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from draftsmith.errors import ConfigError, TargetError
from draftsmith.records import FrozenEnds, TargetFacts
from draftsmith.target import smollm2
from draftsmith.target.anatomy import Anatomy, find_anatomy, frozen_ends, layers_cut
from draftsmith.target.bundled import PREFIX, config_folder
from draftsmith.target.facts import facts_from_config

logger = logging.getLogger(__name__)

RANDOM_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Which model the drafter is for, and how it is loaded."""

    target: str
    """The target: a Hugging Face hub id, a local folder, `smollm2` (bundled, 135M), or for plans `configs/qwen3-8b`."""
    revision: str = ""
    """Branch, tag or commit of a hub id; empty for its default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and activations of the target: auto is float32 on a CPU, bfloat16 on a GPU."""
    adapter: str = ""
    """A LoRA adapter (folder or hub id) merged into the target on loading; needs the package peft."""
    target_compute: Literal["native", "fp8"] = "native"
    """`fp8` runs the target's large products in row-wise 8-bit floats (Hopper GPUs or newer); its error is printed."""
    target_attention: str = ""
    """Attention kernel of the target as transformers names it (sdpa, eager, flash_attention_2); empty: its choice."""
    device_map: Literal["", "auto", "balanced", "sequential"] = ""
    """Spreads one target over all visible GPUs, as transformers does it; empty keeps it on one device."""
    trust_remote_code: bool = False
    """Runs model code that comes with the checkpoint. Only for sources you trust."""

    def __post_init__(self) -> None:
        if not self.target:
            raise ConfigError("no target given: name a hub id, a local folder or smollm2 with --target")
        if self.target == smollm2.NAME and (self.revision or self.trust_remote_code):
            raise ConfigError("the bundled target smollm2 takes neither --revision nor --trust-remote-code: drop them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A frozen causal LM on its device. One Target serves one thread: hooks and cuts change its modules in place."""

    model: Any
    """The Hugging Face model in eval mode, no parameter requiring gradients: `model(input_ids=...).logits`."""
    facts: TargetFacts
    anatomy: Anatomy
    device: torch.device
    """Of its embedding: where token ids go."""
    maybe_tokenizer: Any
    """None only for random weights made from a bare config."""
    _ends: FrozenEnds

    @property
    def tokenizer(self) -> Any:
        if self.maybe_tokenizer is None:
            raise TargetError(f"{self.facts.name} comes without a tokenizer: add its tokenizer files to the folder")
        return self.maybe_tokenizer

    @property
    def layers(self) -> nn.ModuleList:
        return self.anatomy.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.anatomy.final_norm

    def ends(self) -> FrozenEnds:
        """Embedding and head, shared by reference."""
        return self._ends


@contextmanager
def cut_after(target: Target, last_tap: int) -> Generator[None]:
    """The target runs only layers 0..`last_tap` inside; nothing behind them is computed. Restored afterwards."""
    with layers_cut(target.anatomy, last_tap + 1):
        yield


def load_target(config: TargetConfig, device: torch.device | str, *, random_weights: bool = False) -> Target:
    """Load and freeze the target on `device`; `random_weights` needs only its config (benchmarks, tests).

    Raises:
        TargetError: not found, not a causal LM, an adapter that doesn't fit, or a missing package; names the remedy.
    """
    where = torch.device(device)
    source = locate(config)
    hf_config = load_config(config, source)
    dtype = resolve_dtype(config.dtype, where)
    tokenizer = load_tokenizer(config, source, required=not random_weights)
    if random_weights:
        model = _random_model(hf_config, where, dtype)
    else:
        model = _load_weights(config, source, hf_config, where, dtype)
    if config.adapter:
        model = merge_adapter(model, config.adapter)
    return build_target(model, tokenizer, name=config.target)


def read_facts(config: TargetConfig) -> TargetFacts:
    """The target's facts from its config and tokenizer, without its weights (planning).

    Raises:
        TargetError: as `load_target`.
    """
    source = locate(config)
    hf_config = load_config(config, source)
    tokenizer = load_tokenizer(config, source, required=False)
    return facts_from_config(hf_config, tokenizer, name=config.target)


def build_target(model: Any, tokenizer: Any, *, name: str) -> Target:
    """Freeze a loaded `model` and find its parts; checks them with one forward pass of a few tokens.

    Raises:
        TargetError: an architecture that can't be tapped or drafted for.
    """
    model.eval()
    model.requires_grad_(False)
    rows = int(model.get_input_embeddings().weight.shape[0])
    facts = facts_from_config(
        model.config, tokenizer, name=name, generation_config=model.generation_config, vocab_size=rows
    )
    anatomy = find_anatomy(model, facts.num_layers)
    ends = frozen_ends(model, anatomy)
    device = ends.embedding_VH.device
    return Target(model=model, facts=facts, anatomy=anatomy, device=device, maybe_tokenizer=tokenizer, _ends=ends)


def resolve_dtype(choice: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, where bf16 has no fast kernels, bfloat16 elsewhere."""
    if choice == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if choice == "float32" else torch.bfloat16


def locate(config: TargetConfig) -> str:
    """The folder or hub id that transformers loads from."""
    if config.target == smollm2.NAME:
        return str(smollm2.model_folder())
    if config.target.startswith(PREFIX):
        return str(config_folder(config.target))
    path = Path(config.target).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise TargetError(f"{config.target} holds no config.json: give the folder of a Hugging Face model")
        return str(path)
    if path.is_absolute() or config.target.startswith((".", "~")) or config.target.count("/") > 1:
        raise TargetError(f"target folder {config.target} doesn't exist: check the path, or give a hub id or smollm2")
    return config.target


def _hub_options(config: TargetConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision:
        options["revision"] = config.revision
    return options


def load_config(config: TargetConfig, source: str) -> Any:
    """The Hugging Face config at `source`.

    Raises:
        TargetError: unreachable, unreadable or of an unknown architecture.
    """
    import transformers

    try:
        return cast(Any, transformers.AutoConfig).from_pretrained(source, **_hub_options(config))
    except (OSError, json.JSONDecodeError) as error:
        raise TargetError(
            f"can't read the target {config.target} ({_first_line(error)}): check its name and your network, "
            "run `hf auth login` for a gated model, or download it and give the folder"
        ) from error
    except (ValueError, KeyError) as error:
        raise TargetError(
            f"transformers {transformers.__version__} doesn't know the architecture of {config.target} "
            f"({_first_line(error)}): update transformers, or add --trust-remote-code if you trust its code"
        ) from error


def load_tokenizer(config: TargetConfig, source: str, *, required: bool) -> Any:
    """The tokenizer at `source`; None where there is none and it isn't `required`.

    Raises:
        TargetError: required and missing.
    """
    from transformers import AutoTokenizer

    try:
        found = cast(Any, AutoTokenizer).from_pretrained(source, **_hub_options(config))
        # Without vocabulary files transformers makes some families' tokenizers from nothing but special tokens.
        reason = "" if len(found) > len(found.added_tokens_decoder) else "no vocabulary files"
        # Text as it is: transformers' clean-up takes spaces before punctuation away, or warns that it doesn't.
        found.clean_up_tokenization_spaces = False
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        found, reason = None, _first_line(error)
    if not reason:
        return found
    if required:
        raise TargetError(
            f"can't load the tokenizer of {config.target} ({reason}): add its tokenizer files to the folder"
        )
    return None


def auto_class(hf_config: Any, name: str) -> Any:
    """The transformers class that gives a causal LM; the image-text class only where there is no text-only one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    remote: dict[str, Any] = hf_config.to_dict().get("auto_map") or {}
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote:
        return AutoModelForCausalLM
    if type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise TargetError(f"{name} is a {hf_config.model_type} model, not a causal language model: give one as --target")


def _load_weights(config: TargetConfig, source: str, hf_config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    options = _hub_options(config) | {"config": hf_config, "dtype": dtype}
    if config.target_attention:
        options["attn_implementation"] = config.target_attention
    if config.device_map:
        options["device_map"] = config.device_map
    elif device.type != "cpu":
        options["device_map"] = {"": device}  # straight to the GPU: never twice in host memory
    try:
        with _bars_on_terminals_only():
            return auto_class(hf_config, config.target).from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, TargetError | torch.OutOfMemoryError):
            raise
        raise TargetError(
            f"can't load the weights of {config.target} ({_first_line(error)}): "
            "check that the folder is complete and that packages its quantisation needs are installed"
        ) from error


@contextmanager
def _bars_on_terminals_only() -> Generator[None]:
    """transformers draws its progress bar into log files too, over and over."""
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _random_model(hf_config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    # Every device draws the same weights, so that workers of one benchmark run the same model.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(RANDOM_SEED)
        return auto_class(hf_config, "the config").from_config(hf_config, dtype=dtype)


def merge_adapter(model: Any, adapter: str) -> Any:
    """`model` with the LoRA weights of `adapter` added into its own; what trains and serves is then one plain model.

    Raises:
        TargetError: peft is missing, or the adapter doesn't exist or fit.
    """
    if importlib.util.find_spec("peft") is None:
        raise TargetError("--adapter needs the package peft: pip install peft")
    peft: Any = importlib.import_module("peft")
    path = Path(adapter).expanduser()
    if path.exists() and not (path / "adapter_config.json").is_file():
        raise TargetError(f"adapter {adapter} holds no adapter_config.json: give a folder written by peft")
    where = str(path) if path.exists() else adapter
    try:
        wrapped = peft.PeftModel.from_pretrained(model, where)
        lost = set(peft.load_peft_weights(where, device="cpu")) - set(peft.get_peft_model_state_dict(wrapped))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise TargetError(
            f"adapter {adapter} can't be merged ({_first_line(error)}): check its path and that it was trained on "
            f"this {type(model).__name__}"
        ) from error
    if lost:  # peft drops weights of modules that the model lacks, and merges the rest
        raise TargetError(
            f"adapter {adapter} has {len(lost)} weights with no place in this {type(model).__name__}, such as "
            f"{min(lost)}: give the target it was trained on"
        )
    return wrapped.merge_and_unload()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
