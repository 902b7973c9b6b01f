"""The model card."""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.evaluate.acceptance import EvalConfig, evaluate_prompts
from draftsmith.evaluate.card import CACHED, model_card, trained_on
from draftsmith.evaluate.prompts import Prompt
from draftsmith.target.smollm2 import CACHE, NAME
from tests.evaluate.overfit import overfit


def test_the_card_says_how_to_serve_and_what_was_measured() -> None:
    case = overfit("llama")
    config = case.drafter.config
    bare = model_card(config, "org/target", recipe={"lr": 6e-4}, data=trained_on("chats", "f00d"), name="me/drafter")
    assert "Not measured yet" in bare
    assert '"num_speculative_tokens": 7' in bare
    assert "--speculative-num-draft-tokens 8" in bare
    assert "Trained on `chats` (data fingerprint `f00d`)." in bare
    assert '"lr": 0.0006' in bare
    asked = [Prompt(source="talk", text="abcabc"), Prompt(source="code", text="Hello")]
    settings = EvalConfig(max_new_tokens=8, template_kwargs={"enable_thinking": False})
    result = evaluate_prompts(case.target, case.drafter, asked, settings)
    text = model_card(config, "org/target", recipe={}, data="", evaluation=json.loads(json.dumps(result.to_dict())))
    assert f"| talk | 1 | {result.groups()['talk'].tau} | yes |" in text
    assert "| code | 1 |" in text
    assert "enable_thinking=False" in text


def test_the_bundled_target_is_served_from_its_folder() -> None:
    """`vllm serve smollm2` would look for a hub id of that name."""
    text = model_card(overfit("llama").drafter.config, NAME, recipe={}, data="")
    assert "vllm serve ~/.cache/draftsmith/smollm2-* " in text
    assert "--model-path ~/.cache/draftsmith/smollm2-* " in text
    assert str(CACHE) == str(Path(CACHED).expanduser())
