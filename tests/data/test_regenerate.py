from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.regenerate import (
    Answer,
    Prompt,
    RegenerateConfig,
    SamplingConfig,
    answer_all,
    regenerate,
)
from draftsmith.data.servers import ServerConfig, ServerGenerate
from draftsmith.data.tokenize import TokenizeConfig, tokenize_conversation
from draftsmith.errors import ConfigError, DataError
from tests.data.answering import Answering, own

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


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_is_replaced_in_order(chats: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    config = RegenerateConfig(sampling=SamplingConfig(temperature=0.7), template_kwargs={"enable_thinking": False})
    report = regenerate(chats, tmp_path / "own.jsonl", Answering(own), config, Console(file=screen))
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


def test_rows_that_a_weight_leaves_out_are_not_waited_for(tmp_path: Path) -> None:
    lines = [json.dumps(conversation(index)) for index in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    screen = io.StringIO()
    source = f"{tmp_path / 'chats.jsonl'}:0.25"
    report = regenerate(source, tmp_path / "own.jsonl", Answering(own), RegenerateConfig(), Console(file=screen))
    assert 0 < report.rows_out < 40
    assert screen.getvalue().startswith(f"regenerating: {report.rows_out} of 10 rows")


def test_cut_answers_are_dropped_on_request_and_last_turns_alone_replaced(chats: Path, tmp_path: Path) -> None:
    config = RegenerateConfig(cut_answers="drop", every_turn=False)
    report = regenerate(chats, tmp_path / "own.jsonl", Answering(own), config)
    assert report.rows_out == 20, "q4.0 is no last turn of row 4"
    answers = [message["content"] for message in rows_of(tmp_path / "own.jsonl")[2]["messages"][1::2]]
    assert answers == ["foreign", "foreign", "own q2.2"]
    report = regenerate(chats, tmp_path / "all.jsonl", Answering(own), RegenerateConfig(cut_answers="drop"))
    assert report.skipped["the answer reached the longest length"] == 1


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_loses_and_doubles_nothing(chats: Path, tmp_path: Path, torn: bool) -> None:
    out = tmp_path / "own.jsonl"
    asked: Counter[str] = Counter()
    lives = 16

    def dying(prompt: Prompt) -> Answer | Skip:
        nonlocal lives
        if lives == 0:
            raise _KilledError
        lives -= 1
        asked[str(prompt.messages[-1]["content"])] += 1
        return own(prompt)

    config = RegenerateConfig()
    partial = tmp_path / "own.jsonl.partial"
    with pytest.raises(_KilledError):
        regenerate(chats, out, Answering(dying), config)
    assert len(partial.read_text().splitlines()) == 1 + 16, "every answer was kept, of rows not finished too"
    if torn:
        partial.write_bytes(partial.read_bytes()[:-7])
        lives = 5
        with pytest.raises(_KilledError):
            regenerate(chats, out, Answering(dying), config)
        assert all(json.loads(line) for line in partial.read_text().splitlines())
        assert len(partial.read_text().splitlines()) == 1 + 16 - 1 + 5
    lives = 1000
    report = regenerate(chats, out, Answering(dying), config)
    assert (report.rows_in, report.rows_out) == (23, 20)
    for index, row in enumerate(rows_of(out)):
        contents = [message["content"] for message in row["messages"]]
        turns = range(1 if index == 4 else 1 + index % 3)
        assert contents == [text for turn in turns for text in (f"q{index}.{turn}", f"own q{index}.{turn}")]
    assert asked.total() == len(asked) + torn, "only the answer whose line was torn is asked for twice"
    assert len(asked) == sum(1 if index == 4 else 1 + index % 3 for index in range(20))
    assert not partial.exists()


def test_a_journal_of_other_settings_is_refused(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"

    def dying(prompt: Prompt) -> Answer | Skip:
        raise _KilledError

    with pytest.raises(_KilledError):
        regenerate(chats, out, Answering(dying), RegenerateConfig())
    with pytest.raises(DataError, match="other data or settings"):
        regenerate(chats, out, Answering(own), RegenerateConfig(every_turn=False))
    regenerate(chats, out, Answering(own), RegenerateConfig())
    with pytest.raises(DataError, match="exists: choose another --out"):
        regenerate(chats, out, Answering(own), RegenerateConfig())


def test_nothing_regenerated_is_an_error(chats: Path, tmp_path: Path) -> None:
    refusing = Answering(lambda prompt: Skip("too long"))
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

    message = {"role": "assistant", "content": "Hello"}
    answer = Answer(message=message, finish_reason="stop", prompt_ids=tuple(prompt_ids), completion_ids=tuple(sampled))
    config = RegenerateConfig(template_kwargs={"enable_thinking": False})
    regenerate(tmp_path / "chats.jsonl", tmp_path / "own.jsonl", Answering(lambda prompt: answer), config)
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
        (lambda: ServerGenerate(ServerConfig(), SamplingConfig()), "--server"),
        (lambda: ServerConfig(concurrency=0), "--concurrency"),
    ],
)
def test_options_out_of_range_are_refused(build: Callable[[], Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        build()


def test_a_refused_prompt_is_asked_again_by_the_next_run(chats: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(prompt: Prompt) -> Answer | Skip:
        asked.append(str(prompt.messages[-1]["content"]))
        return own(prompt)

    config = RegenerateConfig(every_turn=False)
    refuse = Answering(lambda prompt: Skip("the server refused the prompt", "no model \ud800"))
    with pytest.raises(DataError, match=r"refused the prompt \(20\) no model \\ud800"):
        regenerate(chats, tmp_path / "own.jsonl", refuse, config)
    report = regenerate(chats, tmp_path / "own.jsonl", Answering(answer), config)
    assert len(asked) == report.rows_out == 20
    assert report.rows_in == 23
    assert "the server refused the prompt" not in report.skipped


def test_a_tool_call_ends_the_conversation(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    call = Answering(lambda prompt: Answer(message=message, finish_reason="tool_calls"))
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps(conversation(0, turns=3) | {"tools": [{"function": {"name": "f"}}]}))
    regenerate(chats, tmp_path / "own.jsonl", call, RegenerateConfig())
    (row,) = rows_of(tmp_path / "own.jsonl")
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["finish_reason"] == "tool_calls"


def test_short_answers_wait_for_no_long_one_and_few_rows_are_open(chats: Path, tmp_path: Path) -> None:
    """The first row's answer comes last of all: every other is asked for and finished while it is under way."""
    partial = tmp_path / "own.jsonl.partial"
    lines_before_the_slow_one = 0

    def reply(prompt: Prompt) -> Answer | Skip:
        nonlocal lines_before_the_slow_one
        if prompt.messages[0]["content"] == "q0.0":
            lines_before_the_slow_one = len(partial.read_text().splitlines())
        return own(prompt)

    slow = Answering(reply, window=3, choose=lambda tickets: max(tickets, key=lambda ticket: (ticket != 0, -ticket)))
    report = regenerate(chats, tmp_path / "own.jsonl", slow, RegenerateConfig())
    assert slow.most_waiting == 3
    num_answers = sum(1 if index == 4 else 1 + index % 3 for index in range(20))
    assert lines_before_the_slow_one == 1 + num_answers - 1 + sum(report.skipped.values())
    assert [row["messages"][0]["content"] for row in rows_of(tmp_path / "own.jsonl")] == [f"q{i}.0" for i in range(20)]


QUESTION = {"role": "user", "content": "q"}
QUESTIONS: dict[str, dict[str, Any]] = {
    "user turn alone": {"messages": [QUESTION]},
    "after a system turn": {"messages": [{"role": "system", "content": "s"}, QUESTION]},
    "a prompt": {"prompt": "q"},
    "a prompt of messages": {"prompt": [QUESTION]},
    "from and value": {"conversations": [{"from": "human", "value": "q"}]},
}


@pytest.mark.parametrize("row", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_without_an_answer_gets_one(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps(row))
    report = regenerate(tmp_path / "questions.jsonl", tmp_path / "own.jsonl", Answering(own), RegenerateConfig())
    assert report.rows_out == 1
    messages = rows_of(tmp_path / "own.jsonl")[0]["messages"]
    assert [message["content"] for message in messages[-2:]] == ["q", "own q"]
    assert isinstance(parse_row(rows_of(tmp_path / "own.jsonl")[0]), Conversation)
    refused = parse_row(row)
    assert isinstance(refused, Skip), "nothing to learn from before it is answered"
    assert refused.reason == "no assistant turn"


@pytest.mark.parametrize("every_turn", [True, False])
def test_a_last_question_is_answered_too(every_turn: bool, tmp_path: Path) -> None:
    row = {"messages": [*conversation(0)["messages"], QUESTION]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    regenerate(
        tmp_path / "chats.jsonl", tmp_path / "own.jsonl", Answering(own), RegenerateConfig(every_turn=every_turn)
    )
    contents = [message["content"] for message in rows_of(tmp_path / "own.jsonl")[0]["messages"]]
    assert contents == ["q0.0", "own q0.0" if every_turn else "foreign", "q", "own q"]


def test_rows_that_ask_nothing_say_so(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in ("system", "assistant")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": [QUESTION]}]))
    report = regenerate(tmp_path / "chats.jsonl", tmp_path / "own.jsonl", Answering(own), RegenerateConfig())
    assert report.rows_out == 1
    assert [(reason.split(":")[0], count) for reason, count in report.skipped.items()] == [("nothing to answer", 2)]


def test_answers_come_back_in_the_order_of_the_prompts() -> None:
    asked = [
        Prompt(messages=[{"role": "user", "content": f"q{index}"}], tools=(), template_kwargs={}, seed=index)
        for index in range(9)
    ]
    answering = Answering(own, window=4)
    answers = answer_all(answering, asked)
    assert [answer.message["content"] for answer in answers if isinstance(answer, Answer)] == [
        f"own q{index}" for index in range(9)
    ]
    assert answering.most_waiting == 4
