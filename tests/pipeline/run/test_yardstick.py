"""What a run measures itself on, and what it says at its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.evaluate.acceptance import EvalResult
from draftsmith.evaluate.decode import Decoded, VerifyStep
from draftsmith.evaluate.statistics import Answered
from draftsmith.pipeline.documents import prompt_of
from draftsmith.pipeline.run import RunResult, train, verdict, yardstick
from draftsmith.pipeline.run.yardstick import Yardstick, with_weights, yardstick_of
from draftsmith.pipeline.settings import DrafterOptions, MeasureOptions
from draftsmith.pipeline.stage import RunConfig, Stage
from tests.pipeline.runs import quiet, stage_in, write_inputs


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("stage")
    return stage_in(write_inputs(folder), folder / "run")


def measured_by(stage: Stage, measure: MeasureOptions) -> Yardstick:
    return yardstick_of(replace(stage, config=replace(stage.config, measure=measure)))


def test_conversations_held_out_are_measured_on_up_to_their_answer(stage: Stage) -> None:
    found = measured_by(stage, MeasureOptions(num_prompts=2, max_new_tokens=5))
    assert stage.inputs.data is not None
    held_out = stage.inputs.data.held_out
    assert [list(prompt.token_ids) for prompt in found.prompts] == [prompt_of(held_out[0]), prompt_of(held_out[1])]
    assert [len(plain.token_ids) for plain in found.plains] == [5, 5]


def test_prompts_named_go_before_them(stage: Stage, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(3)))
    found = measured_by(stage, MeasureOptions(prompts=(str(prompts),), num_prompts=0, max_new_tokens=4))
    assert [prompt.text for prompt in found.prompts] == ["say 0", "say 1", "say 2"]
    result = found.measure(stage.start.drafter, "mine", max_drafts=2)
    assert result is not None
    assert (result.name, result.summary.identical) == ("mine", "yes")
    assert {step.drafted for answer in result.answers for step in answer.decoded.steps} <= {1, 2}
    during = found.during()
    assert during is not None
    score, line = during(1, dict(stage.start.drafter.state_dict()))
    assert score == line["tau"]["value"]


def test_without_prompts_nothing_is_measured(stage: Stage) -> None:
    empty = replace(stage.inputs, data=None)
    found = measured_by(replace(stage, inputs=empty), MeasureOptions())
    assert found.measure(stage.start.drafter, "mine") is None
    assert found.during() is None


def test_weights_come_back_as_a_drafter(stage: Stage) -> None:
    weights = {name: tensor + 1 for name, tensor in stage.start.drafter.state_dict().items()}
    again = with_weights(stage.start.config, weights).state_dict()
    assert all(bool((again[name] == weights[name]).all()) for name in weights)


def test_a_run_ends_at_the_pace_that_pays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that cost more with every draft than a draft can bring: one is verified, and that is measured too."""
    config = write_inputs(tmp_path)
    config = replace(
        config,
        out=str(tmp_path / "run"),
        batch=replace(config.batch, max_steps=2),
        measure=MeasureOptions(num_prompts=2, max_new_tokens=8, pace=True),
    )
    monkeypatch.setattr(yardstick, "step_costs", lambda *_: [2.0 + 9.0 * k for k in range(7)])
    result = train(config, quiet())
    assert result.after is not None
    assert result.before is not None
    assert result.paced is not None
    for measured in (result.before, result.after):
        assert measured.pace is not None
        assert measured.pace.num_drafts == 1
        assert max(step.drafted for answer in measured.answers for step in answer.decoded.steps) == 7
    assert result.paced.name == "after, 1 drafts"
    assert {step.drafted for answer in result.paced.answers for step in answer.decoded.steps} == {1}
    assert set(json.loads((tmp_path / "run" / "evaluation.json").read_text())) == {"before", "after", "paced"}


def test_timed_steps_are_of_this_runs_target(stage: Stage) -> None:
    costs = measured_by(stage, MeasureOptions(num_prompts=1, max_new_tokens=4)).costs(stage.start.drafter)
    assert len(costs) == stage.start.config.block_size - 1
    assert all(cost > 0 for cost in costs)


def answered(committed: list[int]) -> tuple[Answered, ...]:
    """One prompt per number, answered in one step that committed so many tokens."""
    answers: list[Answered] = []
    for count in committed:
        step = VerifyStep(drafted=7, accepted=count - 1, committed=count)
        decoded = Decoded(token_ids=(1,) * (count + 1), steps=(step,), prefill_seconds=0.1, seconds=0.1, num_reruns=0)
        answers.append(
            Answered(source="s", domain="", num_prompt_tokens=3, decoded=decoded, plain=None, agreement=None)
        )
    return tuple(answers)


def ended(config: RunConfig, before: list[int], after: list[int], start: str) -> RunResult:
    results = [
        EvalResult(name=name, target="t", config=None, answers=answered(counts))  # type: ignore[arg-type]
        for name, counts in (("before", before), ("after", after))
    ]
    return RunResult(
        out=Path(config.out),
        steps=1,
        before=results[0],
        after=results[1],
        drafter=Path("d"),
        seconds=1.0,
        last={},
        interrupted=False,
        start=start,
    )


def test_a_run_that_went_on_from_a_drafter_says_which_of_both_to_keep(stage: Stage) -> None:
    better = ended(stage.config, [2, 2, 2, 3], [4, 4, 4, 5], "stock")
    assert verdict(better) == "better than the start, stock: +2.00 ± 0.00 tokens a step"
    level = ended(stage.config, [2, 3, 2, 3], [3, 2, 3, 2], "stock")
    assert verdict(level).startswith("not better than the start (+0.00 ±")
    assert verdict(level).endswith("keep stock")
    assert verdict(replace(better, start="")).startswith("after is better than before by 2.00")
    assert DrafterOptions(init_from="stock").init_from == "stock"
