"""The calls for notebooks: a tiny run trained, then measured by its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from draftsmith import api
from tests.pipeline.runs import write_inputs


def test_train_then_evaluate(tmp_path: Path) -> None:
    config = replace(write_inputs(tmp_path), out=str(tmp_path / "run"))
    result = api.train(config, quiet=True)
    assert result.steps == 8
    assert result.after is not None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say 3"}\n{"prompt": "say 4"}\n', encoding="utf-8")
    measured = api.evaluate(
        [str(tmp_path / "run"), str(result.drafter)],
        config.target,
        api.EvalConfig(prompts=(str(prompts),), max_new_tokens=8),
        block_size=4,
    )
    assert [one.name for one in measured] == ["run", "run"]
    assert measured[0].summary.num_prompts == 2
    assert measured[0].summary.identical == "yes"
    assert [a.decoded.token_ids for a in measured[0].answers] == [a.decoded.token_ids for a in measured[1].answers]
