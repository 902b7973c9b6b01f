"""The bundled target: converted once, kept whole, and the same model as its GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftsmith.errors import TargetError
from draftsmith.target import smollm2
from draftsmith.target.model import TargetConfig, load_target


def test_folder_is_converted_once_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = tmp_path / "model.gguf", []
    source.write_bytes(b"weights")

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    cache = tmp_path / "cache"
    first, second = smollm2.model_folder(source, cache), smollm2.model_folder(source, cache)
    assert first == second
    assert calls == [source]
    assert [path.name for path in cache.iterdir()] == [first.name]
    source.write_bytes(b"other weights")
    assert smollm2.model_folder(source, cache) != first


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")

    def convert(_file: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        smollm2.model_folder(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_processes_converting_at_once_end_with_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "model.gguf", tmp_path / "cache"
    source.write_bytes(b"weights")

    def convert(_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("late")
        winner = cache / folder.name.split(".")[0]
        winner.mkdir()
        (winner / "config.json").write_text("early")

    monkeypatch.setattr(smollm2, "convert", convert)
    folder = smollm2.model_folder(source, cache)
    assert (folder / "config.json").read_text() == "early"
    assert list(cache.iterdir()) == [folder]


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    source, cache = tmp_path / "model.gguf", tmp_path / "file"
    source.write_bytes(b"weights")
    cache.write_text("in the way")
    with pytest.raises(TargetError, match="make it writable"):
        smollm2.model_folder(source, cache)


@pytest.mark.long
def test_the_converted_model_is_the_gguf_model(tmp_path: Path) -> None:
    source: Any = smollm2.gguf_file()
    folder = smollm2.model_folder(source, tmp_path)
    target = load_target(TargetConfig(target=str(folder)), "cpu")
    direct = transformers.AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    messages = [{"role": "user", "content": "Why is the sky blue? é 中文 <|im_end|>"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ours = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert torch.equal(ids, ours)
    with torch.no_grad():
        assert torch.equal(target.model(input_ids=ids).logits, direct(input_ids=ids).logits)
    facts = target.facts
    assert (facts.num_layers, facts.hidden_size, facts.head_dim, facts.vocab_size) == (30, 576, 64, 49152)
    assert facts.rope_theta == 1e5
    assert facts.eos_token_ids == (2,)
    assert facts.reserved_token_ids[0] == 16
    assert not {0, 1, 2} & set(facts.reserved_token_ids)
    assert target.ends().head_VH is target.ends().embedding_VH
