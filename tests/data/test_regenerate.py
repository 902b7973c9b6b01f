from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.regenerate import Answer, Prompt, RegenerateConfig, SamplingConfig, regenerate
from draftsmith.data.servers import ServerConfig, ServerGenerate
from draftsmith.data.tokenize import TokenizeConfig, tokenize_conversation
from draftsmith.errors import ConfigError, DataError

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]


def conversation(index: int, turns: int = 1) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"q{index}.{turn}"}, {"role": "assistant", "content": "foreign"}]
    return {"messages": messages}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [conversation(index, 1 + index % 3) for index in range(20)]
    tool = {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        ]
    }
    lines = [json.dumps(row) for row in [*rows, tool, {"text": "rendered"}]] + ["{broken"]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path / "chats.jsonl"


def own(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
    return [
        Answer(
            message={"role": "assistant", "content": f"own {prompt.messages[-1]['content']}"},
            finish_reason="length" if prompt.messages[-1]["content"] == "q4.0" else "stop",
        )
        for prompt in prompts
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_is_replaced_in_order(chats: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    config = RegenerateConfig(
        sampling=SamplingConfig(temperature=0.7), batch_rows=6, template_kwargs={"enable_thinking": False}
    )
    report = regenerate(chats, tmp_path / "own.jsonl", own, config, Console(file=screen))
    rows = rows_of(tmp_path / "own.jsonl")
    assert (report.rows_in, report.rows_out, report.num_cut) == (23, 20, 1)
    assert sum(report.skipped.values()) == 3
    for index, row in enumerate(rows):
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert answers == [f"own q{index}.{turn}" for turn in range(1 if index == 4 else 1 + index % 3)]
        assert row["sampling"]["temperature"] == 0.7
        assert row["chat_template_kwargs"] == {"enable_thinking": False}
        assert row["source"] == f"chats.jsonl:{index + 1}"
    assert rows[4]["finish_reason"] == "length"
    assert json.loads((tmp_path / "own.jsonl.account.json").read_text())["rows_out"] == 20


def test_cut_answers_are_dropped_on_request_and_last_turns_alone_replaced(chats: Path, tmp_path: Path) -> None:
    config = RegenerateConfig(cut_answers="drop", every_turn=False)
    report = regenerate(chats, tmp_path / "own.jsonl", own, config)
    assert report.rows_out == 20, "q4.0 is no last turn of row 4"
    answers = [message["content"] for message in rows_of(tmp_path / "own.jsonl")[2]["messages"][1::2]]
    assert answers == ["foreign", "foreign", "own q2.2"]
    report = regenerate(chats, tmp_path / "all.jsonl", own, RegenerateConfig(cut_answers="drop"))
    assert report.skipped["the answer reached the longest length"] == 1


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_loses_and_doubles_nothing(chats: Path, tmp_path: Path, torn: bool) -> None:
    out = tmp_path / "own.jsonl"
    asked: Counter[str] = Counter()

    def dying(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        if asked.total() > 15:
            raise _KilledError
        asked.update(prompt.messages[-1]["content"] for prompt in prompts)
        return own(prompts)

    config = RegenerateConfig(batch_rows=5)
    with pytest.raises(_KilledError):
        regenerate(chats, out, dying, config)
    partial = tmp_path / "own.jsonl.partial"
    finished = len(partial.read_text().splitlines()) - 1
    assert 0 < finished < 20
    if torn:
        partial.write_bytes(partial.read_bytes()[:-7])
    again: Counter[str] = Counter()

    def counting(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        again.update(prompt.messages[-1]["content"] for prompt in prompts)
        return own(prompts)

    if torn:
        asked.clear()
        asked["as if sixteen"] = 10
        with pytest.raises(_KilledError):
            regenerate(chats, out, dying, config)
        assert all(json.loads(line) for line in partial.read_text().splitlines())
        finished = len(partial.read_text().splitlines())
    report = regenerate(chats, out, counting, config)
    assert (report.rows_in, report.rows_out) == (23, 20)
    assert [row["messages"][0]["content"] for row in rows_of(out)] == [f"q{index}.0" for index in range(20)]
    assert max(again.values()) == 1
    assert sum(content.endswith(".0") for content in again) == 20 - finished + torn
    assert not partial.exists()


def test_a_journal_of_other_settings_is_refused(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"

    def dying(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        raise _KilledError

    with pytest.raises(_KilledError):
        regenerate(chats, out, dying, RegenerateConfig())
    with pytest.raises(DataError, match="other data or settings"):
        regenerate(chats, out, own, RegenerateConfig(every_turn=False))
    regenerate(chats, out, own, RegenerateConfig())
    with pytest.raises(DataError, match="exists: choose another --out"):
        regenerate(chats, out, own, RegenerateConfig())


def test_nothing_regenerated_is_an_error(chats: Path, tmp_path: Path) -> None:
    def refusing(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        return [Skip("too long")] * len(prompts)

    with pytest.raises(DataError, match=r"too long \(20\)"):
        regenerate(chats, tmp_path / "own.jsonl", refusing, RegenerateConfig())


def test_A24_regenerated_rows_are_tokenised_as_they_were_sampled(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    (tmp_path / "chats.jsonl").write_text(json.dumps(conversation(0)))
    messages = conversation(0)["messages"][:1]
    prompt_ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    sampled = tokenizer.convert_tokens_to_ids([*"Hello", "<|im_end|>"])

    def generate(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        message = {"role": "assistant", "content": "Hello"}
        return [
            Answer(message=message, finish_reason="stop", prompt_ids=tuple(prompt_ids), completion_ids=tuple(sampled))
        ]

    config = RegenerateConfig(template_kwargs={"enable_thinking": False})
    regenerate(tmp_path / "chats.jsonl", tmp_path / "own.jsonl", generate, config)
    row = parse_row(rows_of(tmp_path / "own.jsonl")[0])
    assert isinstance(row, Conversation)
    documents = tokenize_conversation(tokenizer, row, TokenizeConfig())
    assert not isinstance(documents, Skip)
    assert documents[0].token_ids.tolist() == prompt_ids + sampled
    assert int(documents[0].loss_mask.sum()) == len(sampled)


@pytest.mark.parametrize(
    ("build", "flag"),
    [
        (lambda: SamplingConfig(temperature=-1), "--temperature"),
        (lambda: SamplingConfig(top_p=0), "--top-p"),
        (lambda: SamplingConfig(max_new_tokens=0), "--max-new-tokens"),
        (lambda: RegenerateConfig(batch_rows=0), "--batch-rows"),
        (lambda: ServerGenerate(ServerConfig(), SamplingConfig()), "--server"),
        (lambda: ServerConfig(concurrency=0), "--concurrency"),
    ],
)
def test_options_out_of_range_are_refused(build: Callable[[], Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        build()


def test_a_refused_prompt_is_asked_again_by_the_next_run(chats: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def refuse(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        return [Skip("the server refused the prompt", "no model \ud800") for _ in prompts]

    def answer(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        asked.extend(prompt.messages[-1]["content"] for prompt in prompts)
        return own(prompts)

    config = RegenerateConfig(every_turn=False)
    with pytest.raises(DataError, match=r"refused the prompt \(20\) no model \\ud800"):
        regenerate(chats, tmp_path / "own.jsonl", refuse, config)
    report = regenerate(chats, tmp_path / "own.jsonl", answer, config)
    assert len(asked) == report.rows_out == 20
    assert report.rows_in == 23
    assert "the server refused the prompt" not in report.skipped


def test_a_tool_call_ends_the_conversation(tmp_path: Path) -> None:
    def call(prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        calls = [{"function": {"name": "f", "arguments": "{}"}}]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        return [Answer(message=message, finish_reason="tool_calls") for _ in prompts]

    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps(conversation(0, turns=3) | {"tools": [{"function": {"name": "f"}}]}))
    regenerate(chats, tmp_path / "own.jsonl", call, RegenerateConfig())
    (row,) = rows_of(tmp_path / "own.jsonl")
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["finish_reason"] == "tool_calls"
