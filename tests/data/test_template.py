from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Skip
from draftsmith.data.template import ChatTemplate
from draftsmith.errors import TargetError

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
USER = [{"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("name", "tail", "emitted"),
    [
        ("chatml", ["<|im_end|>", "Ċ"], 1),
        ("gemma", ["<end_of_turn>", "Ċ"], 1),
        ("llama3", ["<|eot_id|>"], 1),
        ("mistral", ["<|endoftext|>"], 1),
        ("upper", ["<|end|>", "Ċ", "<|im_end|>"], 1),
    ],
)
def test_how_a_turn_ends_is_probed(tokenizer_for: ForTemplate, name: str, tail: list[str], emitted: int) -> None:
    tokenizer = tokenizer_for(name)
    ending = ChatTemplate(tokenizer).ending({})
    assert tokenizer.convert_ids_to_tokens(list(ending.ids)) == tail
    assert ending.emitted == emitted


def test_text_and_ids_are_those_of_apply_chat_template(tokenizer_for: ForTemplate, template_name: str) -> None:
    tokenizer = tokenizer_for(template_name)
    template = ChatTemplate(tokenizer)
    text = template.render(USER, {}, generation_prompt=True)
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert template.encode([text]) == [expected]
    assert template.encode([]) == []


def test_generation_prompts_with_thinking_switched_off(tokenizer_for: ForTemplate) -> None:
    template = ChatTemplate(tokenizer_for("qwen3"))
    plain, silent = template.prompts(USER, {})
    assert silent == plain + "<think>\n\n</think>\n\n"
    assert template.prompts(USER, {"enable_thinking": False}) == [silent]
    assert len(ChatTemplate(tokenizer_for("chatml")).prompts(USER, {})) == 1


def test_a_template_that_refuses_the_probe_still_has_its_eos(tokenizer_for: ForTemplate) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_for("chatml").backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    template = ChatTemplate(tokenizer, (7,))
    assert template.ending({}).ids == ()
    assert template.end_ids({}) == {tokenizer.eos_token_id, 7}
    assert template.turn_end([30, 31, 7, 32], 1, {}) == (2, 3)
    assert template.turn_end([30, 31, 32], 1, {}) == (3, 3)
    assert isinstance(template.assistant_spans([1], {}), Skip)


def test_no_template_names_the_remedy(tokenizer_for: ForTemplate) -> None:
    with pytest.raises(TargetError, match="instruct version"):
        ChatTemplate(tokenizer_for(None)).require()


def test_several_templates_by_name(tokenizer_for: ForTemplate) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_for("chatml").backend_tokenizer)
    plain = tokenizer_for("chatml").chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": plain + "{# reasoning_content #}"}
    template = ChatTemplate(tokenizer)
    assert template.reasoning_keys == ("reasoning_content",)
    assert template.render(USER, {}).startswith("<|im_start|>user")
