"""A small byte-level BPE tokenizer and chat templates written in the style of the common families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = [
    "<|endoftext|>",
    "<|begin|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|User|>",
    "<|Assistant|>",
    "<|end_of_sentence|>",
    "<|assistant|>",
    "<|user|>",
    "<|system|>",
    "<|end|>",
]
CORPUS = [
    "Hello there, how are you today?\n\nI am fine, thank you.\n",
    "The quick brown fox jumps over the lazy dog.\n\n\nassistant user system model tool\n",
    "What is the capital of France?  Paris is the capital of France.\n\n",
    "def f(x):\n    return x + 1\n\n\n中文字符 你好 世界 é à ü 😀 👩‍👩‍👧 🇫🇷\n",
]
EOS = {
    "mistral": "<|endoftext|>",
    "deepseek": "<|end_of_sentence|>",
    "llama3": "<|endoftext|>",
    "gemma": "<|endoftext|>",
}
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""As Llama 3 and Qwen split words: a run of new lines stays whole before a letter (GPT-2's pattern splits its last
one off)."""
NAMES = ("chatml", "llama3", "gemma", "mistral", "qwen3", "qwen35", "deepseek", "tagged", "upper")


def build_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    eos = EOS.get(template or "", "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<|begin|>")
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_for() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Tokenizer by the name of its template, None for a base model without one."""
    built: dict[str | None, PreTrainedTokenizerFast] = {}

    def get(template: str | None) -> PreTrainedTokenizerFast:
        if template not in built:
            built[template] = build_tokenizer(template)
        return built[template]

    return get


@pytest.fixture(params=NAMES)
def template_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
