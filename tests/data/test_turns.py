from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Conversation
from draftsmith.data.template import ChatTemplate
from draftsmith.data.turns import locate_turns, messages_for

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]


def conversation(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(messages=tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)))


def test_each_turn_ends_its_own_render(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    located = locate_turns(ChatTemplate(tokenizer), conversation("u", "Hello", "v", "there"), {}, last_only=False)
    assert [tokenizer.decode(turn.ids[turn.start : turn.end]) for turn in located.turns] == [
        "Hello<|im_end|>",
        "there<|im_end|>",
    ]
    assert len(located.turns[0].ids) < len(located.turns[1].ids)


def test_a_turn_that_cannot_be_shown_leaves_the_others(tokenizer_for: ForTemplate) -> None:
    located = locate_turns(
        ChatTemplate(tokenizer_for("chatml")), conversation("u", "\n\nHello", "v", "there"), {}, last_only=False
    )
    assert len(located.turns) == 1
    assert [skip.reason for skip in located.left_out] == [
        "a turn's first characters merge with the generation prompt's last token"
    ]


def test_messages_after_the_last_answer_are_not_rendered(tokenizer_for: ForTemplate) -> None:
    template = ChatTemplate(tokenizer_for("chatml"))
    answered = locate_turns(template, conversation("u", "Hello"), {}, last_only=False)
    trailing = locate_turns(template, conversation("u", "Hello", "one more"), {}, last_only=False)
    assert answered == trailing


def test_thoughts_stand_under_the_key_that_the_template_reads(tokenizer_for: ForTemplate) -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "t", "weight": 0}
    assert messages_for(ChatTemplate(tokenizer_for("chatml")), [message]) == [{"role": "assistant", "content": "a"}]
    split = {"role": "assistant", "content": "t\n</think>\n\na"}
    for given in (message, split, {"role": "assistant", "content": "<think>\nt\n</think>a"}):
        (shaped,) = messages_for(ChatTemplate(tokenizer_for("qwen3")), [given])
        assert (shaped["content"], shaped["reasoning_content"]) == ("a", "t")
        assert "weight" not in shaped
