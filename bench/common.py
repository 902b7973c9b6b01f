"""What the step benchmarks share: shapes by name, realistic documents, floating-point counts, timing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.drafter.rope import RopeConfig
from draftsmith.records import BatchShape, FeatureBatch, FrozenEnds
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, TrainState


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One benchmark shape: drafter, budget, anchors, loss."""

    drafter: DrafterConfig
    num_tokens: int
    num_anchors: int
    loss: LossConfig
    mean_length: int = 1800
    checkpoint_layers: bool = False

    @property
    def batch(self) -> BatchShape:
        return BatchShape(
            num_tokens=self.num_tokens,
            num_documents=256,
            num_taps=len(self.drafter.taps),
            hidden_size=self.drafter.hidden_size,
            dtype=torch.bfloat16,
            last_hidden=self.loss.distilled,
        )


def _drafter(
    hidden: int, ffn: int, heads: tuple[int, int, int], layers: int, block: int, vocab: int, theta: float
) -> DrafterConfig:
    num_heads, num_kv_heads, head_dim = heads
    return DrafterConfig(
        hidden_size=hidden, intermediate_size=ffn, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        rms_norm_eps=1e-6, layer_types=(FULL,) * layers, sliding_window=0, block_size=block, mask_token_id=vocab - 1,
        taps=(1, 16, 31, 46, 61), num_target_layers=64, vocab_size=vocab,
        rope=RopeConfig(head_dim=head_dim, theta=theta, scaling={}, max_positions=262144),
    )  # fmt: skip


LOSS = LossConfig(loss="ce", weights="decay")
REFERENCE = Shape(
    drafter=_drafter(5120, 17408, (32, 8, 128), 5, 16, 248320, 1e7), num_tokens=49152, num_anchors=1024, loss=LOSS
)
SHAPES: dict[str, Shape] = {
    "qwen3.6-27b": REFERENCE,
    "qwen3.6-27b-dense": replace(REFERENCE, num_anchors=3072),
    "qwen3.6-27b-kl": replace(REFERENCE, loss=LossConfig(loss="kl", weights="decay")),
    "qwen3.6-27b-sliding": replace(
        REFERENCE, drafter=replace(REFERENCE.drafter, layer_types=(SLIDING,) * 4 + (FULL,), sliding_window=2048)
    ),
    "qwen3-8b": Shape(
        drafter=_drafter(4096, 12288, (32, 8, 128), 5, 16, 151936, 1e6), num_tokens=16384, num_anchors=512, loss=LOSS
    ),
    # For a 24 GB card without the target (features from disk): three layers, a small budget, small chunks of logits.
    "qwen3-8b-24gb": Shape(
        drafter=_drafter(4096, 12288, (32, 8, 128), 3, 16, 151936, 1e6), num_tokens=8192, num_anchors=256,
        loss=replace(LOSS, chunk_rows=1024), checkpoint_layers=True,
    ),
    "smollm2": Shape(
        drafter=_drafter(576, 1536, (9, 3, 64), 2, 8, 49152, 1e5), num_tokens=16384, num_anchors=1024, loss=LOSS,
        mean_length=260,
    ),
    "tiny": Shape(
        drafter=_drafter(256, 512, (4, 2, 64), 2, 8, 1024, 1e4), num_tokens=2048, num_anchors=128, loss=LOSS,
        mean_length=200,
    ),
}  # fmt: skip


def step_flops(shape: Shape) -> float:
    """Model floating-point operations of a draw, attention left out: products of layers, context keys, fc and head."""
    d = shape.drafter
    rows, tokens, H = shape.num_anchors * d.block_size, shape.num_tokens, d.hidden_size
    heads, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    layers = d.num_layers * (2 * H * heads + 2 * H * keys + 3 * H * d.intermediate_size)
    context = d.num_layers * 2 * H * keys
    head = 4 * rows * H * d.vocab_size * (2 if shape.loss.distilled else 1) - (
        2 * rows * H * d.vocab_size if shape.loss.distilled else 0
    )
    return 6 * rows * layers + 6 * tokens * context + 4 * tokens * len(d.taps) * H * H + head


def documents(num_tokens: int, mean_length: int, seed: int) -> list[int]:
    """Log-normal lengths (median `mean_length`, deviation 0.6), between 64 and 8,192, until the next doesn't fit."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while len(lengths) < 256:
        drawn = torch.empty(1).log_normal_(math.log(mean_length), 0.6, generator=generator).item()
        length = int(min(8192, max(64, drawn)))
        if sum(lengths) + length > num_tokens:
            break
        lengths.append(length)
    return lengths or [num_tokens]


def fill(batch: FeatureBatch, lengths: list[int], vocab_size: int, seed: int) -> None:
    """Random features and ids for documents of `lengths`; the last three quarters of each are supervised."""
    device = batch.features_TFH.device
    generator = torch.Generator(device).manual_seed(seed)
    used = sum(lengths)
    for tensor in batch.tensors().values():
        tensor.zero_()
    batch.lengths_D[: len(lengths)] = torch.tensor(lengths, device=device)
    batch.num_tokens.fill_(used)
    batch.token_ids_T[:used] = torch.randint(vocab_size, (used,), generator=generator, device=device)
    mask = torch.cat([torch.arange(length) >= length // 4 for length in lengths])
    batch.loss_mask_T[:used] = mask.to(device)
    batch.features_TFH[:used].normal_(generator=generator)
    if batch.last_hidden_TH is not None:
        batch.last_hidden_TH[:used].normal_(generator=generator)


def make_state(shape: Shape, device: torch.device, *, compiled: bool, total_steps: int = 1000) -> TrainState:
    """A drafter of `shape` with random weights beside a random embedding and head."""
    d = shape.drafter
    generator = torch.Generator(device).manual_seed(0)

    def ends() -> Tensor:
        values = torch.empty(d.vocab_size, d.hidden_size, device=device, dtype=torch.bfloat16)
        return values.normal_(0.0, 0.02, generator=generator)

    with torch.device(device):
        drafter = Drafter(d)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
    spec = StateSpec(
        loss=LossSpec(config=shape.loss, gamma=resolve_gamma(shape.loss, d.block_size), block_size=d.block_size),
        step=StepConfig(num_anchors=shape.num_anchors, attention="flex", checkpoint_layers=shape.checkpoint_layers),
        optim=OptimConfig(),
        total_steps=total_steps,
        dtype=torch.bfloat16,
        compiled=compiled,
    )
    return build_state(drafter, FrozenEnds(embedding_VH=ends(), head_VH=ends()), spec, device)


def event_ms(run: Callable[[], None], repeats: int) -> float:
    """Milliseconds a call over `repeats` calls back to back, by device events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def median_ms(run: Callable[[], None], runs: int = 5, repeats: int = 1) -> float:
    """Median over `runs` of `event_ms` after two calls of warm-up."""
    for _ in range(2):
        run()
    return statistics.median(event_ms(run, repeats) for _ in range(runs))


def matrix_rate(seconds: float = 5.0) -> float:
    """TFLOP/s of an 8192-cube bf16 product on random data, sustained for `seconds`."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    once = median_ms(lambda: torch.mm(a, b, out=out), repeats=10)
    ms = event_ms(lambda: torch.mm(a, b, out=out), max(10, int(seconds * 1000 / once)))
    return 2 * 8192**3 / ms / 1e9
