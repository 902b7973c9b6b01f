from __future__ import annotations

from draftsmith.data.conversations import Conversation
from draftsmith.data.duplicates import MIN_WORDS, NUM_BANDS, SeenRows, Signature, signature_of

WORDS = [f"word{index}" for index in range(200)]


def signed(text: str) -> Signature:
    signature = signature_of(Conversation(text=text), "drop-near")
    assert signature is not None
    return signature


def reason(first: str, second: str) -> str | None:
    seen = SeenRows()
    assert seen.check(signed(first)) is None
    skip = seen.check(signed(second))
    return skip.reason if skip else None


def test_texts_a_few_words_apart_are_near_and_others_are_not() -> None:
    text = " ".join(WORDS)
    assert reason(text, text) == "duplicate of an earlier row"
    assert reason(text, text.replace("word50 ", "other ").upper()) == "near duplicate of an earlier row"
    assert reason(text, " ".join(WORDS[:100]) + " " + " ".join(f"new{index}" for index in range(100))) is None
    assert reason(text, " ".join(reversed(WORDS))) is None


def test_short_texts_only_match_exactly() -> None:
    assert signed(" ".join(WORDS[: MIN_WORDS - 1])).near == ()
    assert len(signed(" ".join(WORDS[:MIN_WORDS])).near) == NUM_BANDS


def test_every_form_of_a_row_has_a_signature() -> None:
    forms = [
        Conversation(messages=({"role": "user", "content": "u"},)),
        Conversation(messages=({"role": "user", "content": "v"},)),
        Conversation(text="u"),
        Conversation(text="u", completion="v"),
        Conversation(token_ids=(1, 2), loss_mask=(True, True)),
    ]
    signatures = [signature_of(form, "drop-exact") for form in forms]
    assert len({signature.exact for signature in signatures if signature}) == 5
    assert signature_of(forms[0], "keep") is None


def test_scripts_without_spaces_have_near_duplicates_too() -> None:
    text = "今天天气很好我们一起去公园散步然后去喝咖啡再去看一部很有意思的电影最后回家做饭吃饭聊天" * 3
    other = "请解释一下为什么天空是蓝色的以及日落的时候为什么会变成红色这和光的散射有什么关系呢谢谢你" * 3
    assert reason(text, text.replace("咖啡", "绿茶", 1)) == "near duplicate of an earlier row"
    assert reason(text, other) is None


def test_what_every_chat_shares_makes_none_near() -> None:
    """Roles, keys and a long system prompt are no words: short answers to one short question differ."""
    seen = SeenRows()
    for answer in ("red", "blue", "the colour of the sky"):
        said = (("system", " ".join(WORDS)), ("user", "A colour?"), ("assistant", answer))
        messages = tuple({"role": role, "content": text} for role, text in said)
        item = signature_of(Conversation(messages=messages), "drop-near")
        assert item is not None
        assert item.near == ()
        assert seen.check(item) is None
