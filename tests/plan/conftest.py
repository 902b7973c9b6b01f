"""Jobs to plan: the shape that everything was measured at, and a tiny one worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafter.model import FULL, DrafterConfig
from draftsmith.drafter.rope import RopeConfig
from draftsmith.plan.workload import Corpus, Job
from draftsmith.records import BatchShape, TargetFacts
from draftsmith.target.weigh import TargetSize


def make_job(sizes: tuple[int, int, int, int, int], heads: tuple[int, int, int], block: int, tokens: int) -> Job:
    """`sizes`: hidden, FFN, layers, vocabulary, anchors."""
    hidden, ffn, layers, vocab, anchors = sizes
    num_heads, kv_heads, head_dim = heads
    facts = TargetFacts(
        name="t", model_type="qwen3", num_layers=10, hidden_size=hidden, intermediate_size=ffn, num_heads=num_heads,
        num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, tokenizer_size=0, rms_norm_eps=1e-6, rope_theta=1e4,
        rope_scaling={}, max_positions=4096, layer_types=("full_attention",) * 10, eos_token_ids=(1,),
        bos_token_id=None, pad_token_id=None, reserved_token_ids=(vocab - 1,), template_hash="",
    )  # fmt: skip
    drafter = DrafterConfig(
        hidden_size=hidden, intermediate_size=ffn, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=1e-6, layer_types=(FULL,) * layers, sliding_window=0, block_size=block, mask_token_id=vocab - 1,
        taps=(1, 2, 4, 6, 8), num_target_layers=10, vocab_size=vocab,
        rope=RopeConfig(head_dim=head_dim, theta=1e4, scaling={}, max_positions=4096),
    )  # fmt: skip
    shape = BatchShape(
        num_tokens=tokens, num_documents=4, num_taps=5, hidden_size=hidden, dtype=torch.bfloat16, last_hidden=False
    )
    ends = 2 * vocab * hidden
    return Job(
        target=TargetSize(facts=facts, source="s", total=10_000 + ends, layers=(1000,) * 10, ends=ends),
        drafter=drafter, shape=shape, corpus=Corpus(tokens=1000, supervised=500, padding=0.2, fill=0.5, source="test"),
        num_anchors=anchors, labels_per_token=2.0, draws=0, epochs=3.0, max_steps=0, accumulation=1, ring_slots=2,
        chunk_rows=2048, fp8=False, checkpoint_layers=False,
    )  # fmt: skip


@pytest.fixture
def tiny() -> Job:
    """H 4, FFN 8, 2 layers, V 16, 3 anchors x 4 on batches of 32; 1,000 tokens, half of them supervised."""
    return make_job((4, 8, 2, 16, 3), (2, 1, 2), 4, 32)


@pytest.fixture
def reference() -> Job:
    """The benchmark's: T 49,152, 1,024 anchors, B 16, H 5,120, FFN 17,408, 5 layers, V 248,320."""
    job = make_job((5120, 17408, 5, 248320, 1024), (32, 8, 128), 16, 49152)
    return replace(job, corpus=replace(job.corpus, fill=1.0))
