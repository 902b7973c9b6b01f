"""Drafter folders that engines load: written whole or not at all, verified on writing, read back strictly."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import safetensors.torch as safetensors_torch
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.drafter.rope import inverse_frequencies
from draftsmith.errors import ExportError
from draftsmith.evaluate.layout import (
    ExportInfo,
    check_weights,
    config_from_values,
    merge_weights,
    some,
    split_weights,
    zlab_values,
)
from draftsmith.evaluate.probe import RECORD, trained_record
from draftsmith.records import TargetFacts

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
PACKAGED = "smollm2-drafter"
"""The drafter for `smollm2` that ships with the package."""


def export_zlab(
    drafter: Drafter,
    weights: Mapping[str, Tensor] | None,
    info: ExportInfo,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> Path:
    """Write the drafter in the z-lab layout (SGLang, vLLM `method: dflash`, the `dflash` package).

    Args:
        drafter: its config, and its own parameters where `weights` is None.
        weights: parameters by the Drafter's names, such as fp32 masters of a checkpoint.
        info: what the config states of the target.
        out: the folder; an earlier export there is replaced as a whole.
        dtype: of the file.
        card: text of its README.md; none is written where empty.

    Returns:
        `out`.

    Raises:
        ExportError: `out` holds something other than a drafter, or the weights don't fit the config.
    """
    named = split_weights(dict(drafter.named_parameters()) if weights is None else weights, dtype)
    check_weights({name: tuple(weight.shape) for name, weight in named.items()}, drafter.config, "the drafter")

    def write(folder: Path) -> None:
        write_json(folder / CONFIG, zlab_values(drafter.config, info, dtype))
        safetensors_torch.save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        rendering = {"hash": info.template_hash, "kwargs": dict(info.template_kwargs)}
        record = trained_record(drafter.config, merge_weights(named)) | {"target": info.target, "template": rendering}
        write_json(folder / RECORD, record)
        if card:
            (folder / CARD).write_text(card, encoding="utf-8")

    return write_folder(out, write)


def write_folder(out: Path, write: Callable[[Path], None]) -> Path:
    """Fill a temporary folder beside `out`, then put it in its place by renames: no reader sees half of it.

    Raises:
        ExportError: `out` holds something other than an exported drafter.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / CONFIG).is_file())):
        raise ExportError(f"{out} holds something other than a drafter: give an empty or new folder as --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        folder.chmod(0o755)
        write(folder)
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        if out.exists():
            old = folder.with_name(folder.name + "-old")
            out.rename(old)
            folder.rename(out)
            shutil.rmtree(old)
        else:
            folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object on disk.

    Raises:
        ExportError: missing, or not a JSON object.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(f"{path} can't be read ({error.strerror}): give the folder of a drafter") from error
    except ValueError as error:
        raise ExportError(f"{path} is not JSON ({error}): export the drafter again") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} is not a JSON object: export the drafter again")
    return cast(dict[str, Any], values)


def drafter_folder(source: str | Path) -> Path:
    """The local folder of a drafter given as a folder, a hub id or the name of the packaged one, `smollm2-drafter`.

    Raises:
        ExportError: none of them.
    """
    if str(source) == PACKAGED:
        return Path(str(files("draftsmith") / "assets" / PACKAGED))
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    text = str(source)
    if path.is_absolute() or text.startswith(".") or text.count("/") != 1:
        raise ExportError(
            f"drafter folder {source} doesn't exist: check the path, or give a hub id such as z-lab/NAME or {PACKAGED}"
        )
    try:
        hub: Any = huggingface_hub
        return Path(hub.snapshot_download(text, allow_patterns=[CONFIG, RECORD, "*.safetensors"]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"drafter {source} can't be downloaded ({first}): check its name, or give a folder"
        ) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, on the CPU.

    Raises:
        ExportError: no such file, a damaged one, or a name in two of them.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ExportError(f"{folder} holds no {WEIGHTS}: give the folder of a drafter")
    named: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors = safetensors_torch.load_file(file)
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file} is damaged ({error}): export or download the drafter again") from error
        twice = named.keys() & tensors.keys()
        if twice:
            raise ExportError(f"{min(twice)} stands in two files of {folder}: remove the stale one")
        named |= tensors
    return named


def load_zlab(source: str | Path) -> tuple[DrafterConfig, Drafter]:
    """A drafter in the z-lab layout, in fp32 on the CPU; its own config wins over every default.

    Raises:
        ExportError: not such a folder, a config that leaves something to guess, keys or shapes that don't fit it.
    """
    folder = drafter_folder(source)
    config = config_from_values(read_json(folder / CONFIG), str(folder / CONFIG))
    named = read_weights(folder)
    check_weights({name: tuple(weight.shape) for name, weight in named.items()}, config, str(folder))
    drafter = Drafter(config)
    drafter.load_state_dict({name: weight.float() for name, weight in merge_weights(named).items()})
    return config, drafter


def verify_export(
    path: Path, config: DrafterConfig, facts: TargetFacts, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Read an exported folder back and hold it against what was trained and the target it is for.

    Args:
        path: the folder.
        config: as trained.
        facts: of the target.
        weights: as trained, by the Drafter's names; None leaves their values unchecked.

    Raises:
        ExportError: naming the first thing that would serve otherwise than it trained.
    """
    written, _ = load_zlab(path)
    check_against_training(written, config, path / CONFIG)
    check_against_target(written, facts, str(path / CONFIG))
    if weights is not None:
        check_values(path, weights)


def check_against_training(written: DrafterConfig, config: DrafterConfig, path: Path) -> None:
    """Refuse a config file that states another drafter than was trained.

    Raises:
        ExportError: naming the first difference.
    """
    for name in config.__slots__:
        ours, theirs = getattr(config, name), getattr(written, name)
        if name != "rope" and ours != theirs:
            raise ExportError(f"{path} states {name} {theirs}, trained with {ours}: export it again")
    ours, our_factor = inverse_frequencies(config.rope, "cpu")
    theirs, their_factor = inverse_frequencies(written.rope, "cpu")
    if not torch.equal(ours, theirs) or our_factor != their_factor:
        raise ExportError(f"{path} gives other RoPE frequencies than trained with: export it again")


def check_values(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Hold the weights of a folder, bit for bit, against those that were to be written.

    Args:
        path: the folder; its keys and shapes are right already.
        weights: by the Drafter's names, in any dtype: rounded to the file's.

    Raises:
        ExportError: naming the first few that differ, or aren't finite.
    """
    written = read_weights(path)
    trained = split_weights(weights, next(iter(written.values())).dtype)
    odd = sorted(name for name, weight in trained.items() if not torch.isfinite(weight).all())
    if odd:
        raise ExportError(
            f"{path} holds values that are not finite in {some(odd)}: training diverged; export an earlier checkpoint"
        )
    other = sorted(name for name, weight in trained.items() if not torch.equal(weight, written[name]))
    if other:
        raise ExportError(f"{path} holds other values of {some(other)} than were trained: export it again")


def check_against_target(config: DrafterConfig, facts: TargetFacts, where: str) -> None:
    """Refuse a drafter whose taps, mask token or widths its target doesn't have.

    Raises:
        ExportError: naming both numbers.
    """
    if config.num_target_layers != facts.num_layers:
        raise ExportError(
            f"{where} is for a target of {config.num_target_layers} layers; {facts.name} has {facts.num_layers}"
        )
    if list(config.taps) != sorted(set(config.taps)) or config.taps[0] < 0 or config.taps[-1] >= facts.num_layers - 1:
        raise ExportError(
            f"{where} taps layers {list(config.taps)}; needed: rising ids from 0 to {facts.num_layers - 2} (the last "
            f"layer of {facts.name} is captured before its final norm by engines, after it by others)"
        )
    if config.hidden_size != facts.hidden_size:
        raise ExportError(f"{where} has hidden size {config.hidden_size}; {facts.name} has {facts.hidden_size}")
    if config.mask_token_id >= facts.vocab_size or config.vocab_size != facts.vocab_size:
        raise ExportError(
            f"{where} has mask token {config.mask_token_id} and {config.vocab_size} tokens; {facts.name} has "
            f"{facts.vocab_size} embedding rows"
        )
    if config.mask_token_id in {*facts.eos_token_ids, facts.pad_token_id}:
        raise ExportError(
            f"{where} has mask token {config.mask_token_id}, an end or pad token of {facts.name}: use a reserved one, "
            f"such as {list(facts.reserved_token_ids[:3])}"
        )
