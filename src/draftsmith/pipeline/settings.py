"""What a person may choose about a drafter, its batches and its machines; `resolve.py` chooses the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from draftsmith.errors import ConfigError

Auto = Literal["auto"]
Init = Literal["target", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """The drafter's architecture and start; `auto` follows the target."""

    layers: int | Auto = "auto"
    """Drafter layers: auto is 5, or 2 for targets narrower than 1,024."""
    num_heads: int | Auto = "auto"
    """Query heads of a drafter layer: auto is the target's."""
    num_kv_heads: int | Auto = "auto"
    """Key and value heads of a drafter layer, a divisor of --num-heads: auto is the target's."""
    head_dim: int | Auto = "auto"
    """Width of a drafter's head: auto is the target's."""
    intermediate_size: int | Auto = "auto"
    """Width of a drafter's MLP: auto is the target's."""
    block_size: int | Auto = "auto"
    """Tokens a block holds, the known anchor included: auto is 16, or 8 for targets narrower than 1,024."""
    taps: tuple[int, ...] = ()
    """Tapped target layers (0-based decoder layers); empty spreads five over the depth, as the paper does."""
    mask_token_id: int | Auto = "auto"
    """Token that stands for a place to be drafted: auto takes a reserved id of the target."""
    sliding_window: int = 0
    """Window of the sliding layers; 0 gives every layer the whole context."""
    full_layers: int = 1
    """With --sliding-window: how many of the last layers still see everything."""
    init: Literal["auto", "target", "random"] = "auto"
    """Start from copies of the target's last layers where widths agree, or from random weights: auto is the target
    for short runs, random for long ones (4,000 steps and more)."""
    init_from: str = ""
    """Start from an existing drafter (z-lab layout, folder or hub id); its own config decides the architecture."""
    freeze_context: bool = False
    """With --init-from: train the layers alone. fc and hidden_norm stay, the target's side applies them, and a token's
    features are H numbers instead of F x H, on disk and on the way."""
    rope: Literal["target", "plain"] = "target"
    """Take the target's rotary scaling along, or only its theta."""

    def __post_init__(self) -> None:
        if self.layers != "auto" and self.layers < 1:
            raise ConfigError(f"--layers {self.layers} is not 1 or more")
        if self.sliding_window < 0 or self.full_layers < 0:
            raise ConfigError("--sliding-window and --full-layers can't be negative")
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size)
        for name, size in zip(("num-heads", "num-kv-heads", "head-dim", "intermediate-size"), sizes, strict=True):
            if size != "auto" and size < 1:
                raise ConfigError(f"--{name} {size} is not 1 or more; leave it out to take the target's")
        if self.freeze_context and not self.init_from:
            raise ConfigError("--freeze-context keeps what a drafter has learnt of features: name one with --init-from")
        if self.init_from:
            brought = ("init_from", "freeze_context")
            own = [
                one.name for one in fields(self) if one.name not in brought and getattr(self, one.name) != one.default
            ]
            if own:
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in own)
                raise ConfigError(f"--init-from takes the architecture of {self.init_from} as it is: drop {flags}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How much the drafter sees at a time and how often it asks about it."""

    token_budget: int | Auto = "auto"
    """Packed tokens of a batch (T), its one fixed length: auto is 49,152, 16,384 for small targets, 2,048 on a CPU."""
    max_documents: int = 256
    """Most documents in a batch."""
    anchors: int | Auto = "auto"
    """Blocks drafted from a batch at a time: auto is a 32nd of the budget, at most 1,024."""
    labels_per_token: float = 2.5
    """Labels that each supervised token gets per visit; with the anchors it fixes the draws from a batch."""
    draws_per_batch: int | Auto = "auto"
    """Times a batch is used with fresh anchors before it is let go; auto follows --labels-per-token."""
    accumulation: int = 1
    """Draws (per drafter) that make up one optimizer step."""
    num_buckets: int = 6
    """Lengths that documents are padded to for the target's forward."""
    mixed: bool = True
    """Mix lengths within every batch; turning it off only shows what that does to gradients."""
    epochs: float = 6.0
    """Passes over the data."""
    max_steps: int = 0
    """Optimizer steps; 0 follows --epochs."""
    seed: int = 0
    """Seeds the order of batches, the anchors and the random start."""

    def __post_init__(self) -> None:
        if self.labels_per_token <= 0:
            raise ConfigError(f"--labels-per-token {self.labels_per_token} is not above 0")
        if self.accumulation < 1:
            raise ConfigError(f"--accumulation {self.accumulation} is not 1 or more")
        if self.epochs <= 0 or self.max_steps < 0:
            raise ConfigError("--epochs must be above 0, and --max-steps 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Machines and how they work together."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run: auto takes GPUs where there are any."""
    targets: int | Auto = "auto"
    """Workers that run the frozen target; auto, with --drafters left out too, splits the GPUs by rates."""
    drafters: int | Auto = "auto"
    """Workers that train; auto is what --targets leaves."""
    colocate: bool = False
    """Both roles on every GPU, in turns, instead of a split."""
    channel: Literal["auto", "local", "distributed"] = "auto"
    """local: a thread per worker, one process; distributed: a process per worker (torchrun); auto: as started."""
    capture: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs for the drafter's step: auto is on for GPUs. off trains the same functions uncaptured."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """Drafter attention: auto is flex on a GPU and dense on a CPU."""
    checkpoint_layers: bool = False
    """Recompute drafter layers in backward: less memory, more time."""
    feature_noise: float = 0.0
    """Half-width of uniform noise on a copy of the features; 0 is off."""
    ring_slots: int = 2
    """FeatureBatches that may wait in front of each drafter."""
    stall_seconds: float = 900.0
    """Longest wait of one worker for another before the run ends with an error."""
    threads: int = 0
    """CPU threads per worker; 0 leaves torch's choice. Pin it where runs must agree to the bit."""
    strict: bool = False
    """Make a recompile after warm-up an error instead of a counted warning."""

    @property
    def is_open(self) -> bool:
        """Whether the split between the roles is left to the machine."""
        return self.targets == "auto" and self.drafters == "auto" and not self.colocate

    def __post_init__(self) -> None:
        if self.ring_slots < 1:
            raise ConfigError(f"--ring-slots {self.ring_slots} is not 1 or more")
        if self.targets != "auto" and self.targets < 1:
            raise ConfigError(f"--targets {self.targets} is not 1 or more")
        if self.drafters != "auto" and self.drafters < 1:
            raise ConfigError(f"--drafters {self.drafters} is not 1 or more")
        if self.colocate and (self.targets != "auto" or self.drafters != "auto"):
            raise ConfigError("--colocate runs both roles on every GPU: drop --targets and --drafters")
        if self.stall_seconds <= 0 or self.threads < 0 or self.feature_noise < 0:
            raise ConfigError("--stall-seconds must be above 0; --threads and --feature-noise can't be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What to train on."""

    data: str = ""
    """Conversations (a file, a folder, a hub id; several separated by commas) or a folder from `draftsmith prepare`."""
    features: str = ""
    """A folder from `draftsmith capture`: train from features on disk, without running the target."""
    cache_features: bool = False
    """Capture the features of one epoch into the run's folder first, then train from there: the target runs once."""
    hold_out: int = 8
    """Conversations kept out of training to measure on, where no --prompts are given; at most a tenth of the data."""

    def __post_init__(self) -> None:
        if not self.data and not self.features:
            raise ConfigError("nothing to train on: give --data CHATS, or --features from draftsmith capture")
        if self.features and self.cache_features:
            raise ConfigError("--features are captured already: drop --cache-features")
        if self.hold_out < 0:
            raise ConfigError(f"--hold-out {self.hold_out} is negative; 0 holds nothing out")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Whether the target answers first, and how."""

    regenerate: bool = False
    """Let the target answer the questions of --data anew and train on that: rows need no answers of their own."""
    answer_temperature: float = 1.0
    """Of these answers: 1 samples the target's own distribution, 0 answers greedily, as a greedy server will."""
    answer_tokens: int = 512
    """Longest such answer, in tokens."""
    answer_batch: int = 16
    """Answers generated together."""
    answer_seed: int = 0
    """Of their sampling."""

    def __post_init__(self) -> None:
        if self.answer_temperature < 0:
            raise ConfigError(f"--answer-temperature {self.answer_temperature} is below 0: give 0 for greedy answers")
        if self.answer_tokens < 1 or self.answer_batch < 1:
            raise ConfigError("--answer-tokens and --answer-batch must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How training measures itself with the true draft-verify loop."""

    prompts: tuple[str, ...] = ()
    """Prompt sets (JSONL files or names) to measure on; empty takes the conversations held out from --data."""
    num_prompts: int = 8
    """Most prompts of each set; 0 takes all."""
    max_new_tokens: int = 64
    """Longest measured answer, in tokens."""
    eval_every: int = 0
    """Steps between measurements during training, which decide the best checkpoint; 0 measures only at both ends."""
    measure_start: bool = True
    """Measure the drafter before training too, so that the end can be held against it."""
    pace: bool = False
    """At the end, time verify steps of every size on this device, and measure again where fewer drafts pay better."""

    def __post_init__(self) -> None:
        if self.num_prompts < 0 or self.eval_every < 0 or self.max_new_tokens < 1:
            raise ConfigError("--num-prompts and --eval-every can't be negative, --max-new-tokens must be 1 or more")
