"""The model card of an exported drafter: what it is for, how it was made, how well it drafts, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftsmith.drafter.model import DrafterConfig
from draftsmith.evaluate.statistics import Interval
from draftsmith.target.smollm2 import NAME

CACHED = "~/.cache/draftsmith"
"""Where the bundled target lies, as a shell reads it."""


def model_card(
    config: DrafterConfig,
    target: str,
    *,
    recipe: Mapping[str, Any],
    data: str,
    evaluation: Mapping[str, Any] | None = None,
    name: str = "DRAFTER",
) -> str:
    """Text of README.md.

    Args:
        config: of the drafter.
        target: hub id or folder it drafts for.
        recipe: settings of training, as they were resolved.
        data: a sentence on the training data.
        evaluation: measured acceptance, where there is any: `EvalResult.to_dict()`, as evaluation.json keeps it.
        name: folder or hub id under which the drafter will be found.
    """
    layers = ", ".join(f"{config.layer_types.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_types))
    return "\n".join(
        [
            "---",
            f"base_model: {target}",
            "tags: [speculative-decoding, dflash, draftsmith]",
            "---",
            f"# DFlash drafter for {target}",
            "",
            f"Drafts {config.block_size - 1} tokens a step for `{target}`, from hidden states of its layers "
            f"{', '.join(map(str, config.taps))}. It changes the target's speed, never its answers. Embedding and head "
            "are the target's own and not in this folder.",
            "",
            f"Layers: {layers}; hidden {config.hidden_size}; block {config.block_size}; mask token "
            f"{config.mask_token_id}.",
            "",
            "## Acceptance",
            "",
            *_acceptance(evaluation),
            "",
            "## Serving",
            "",
            *_serving(config, target, name),
            "",
            "## Training",
            "",
            data,
            "",
            "```json",
            json.dumps(dict(recipe), indent=2, default=str),
            "```",
            "",
        ]
    )


def trained_on(source: str, fingerprint: str) -> str:
    """The sentence on training data: where it came from, and the fingerprint that tells whether it is the same."""
    return f"Trained on `{source}` (data fingerprint `{fingerprint}`)."


def _acceptance(evaluation: Mapping[str, Any] | None) -> list[str]:
    if evaluation is None:
        return ["Not measured yet: run `draftsmith evaluate` on this folder."]
    config = evaluation["config"]
    kwargs = ", ".join(f"{key}={value}" for key, value in config["template_kwargs"].items()) or "defaults"
    rows = [
        f"| {group} | {figures['num_prompts']} | {Interval(**figures['tau'])} | {figures['identical']} |"
        for group, figures in evaluation["groups"].items()
    ]
    return [
        "tau: tokens committed a verify step, bonus included, with its 95% interval. "
        f"Temperature {config['temperature']}, at most {config['max_new_tokens']} tokens an answer, template "
        f"arguments: {kwargs}.",
        "",
        "| prompts | answers | tau | identical to greedy |",
        "|---|---|---|---|",
        *rows,
    ]


def _serving(config: DrafterConfig, target: str, name: str) -> list[str]:
    drafts, note = config.block_size - 1, ""
    if target == NAME:
        target = f"{CACHED}/{NAME}-*"
        note = f" The bundled target is the folder {target}, which draftsmith converted; engines don't know its name."
    speculative = json.dumps({"method": "dflash", "model": name, "num_speculative_tokens": drafts})
    return [
        "```bash",
        f"vllm serve {target} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\",
        f"  --speculative-draft-model-path {name} --speculative-num-draft-tokens {config.block_size}",
        "```",
        f"vLLM counts the {drafts} drafted tokens, SGLang the whole block of {config.block_size}.{note}",
    ]
