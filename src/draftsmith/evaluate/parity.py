"""Does what was exported serve as it trained? Checked with independent code: the `dflash` package from PyPI.

Four looks, each of which can see faults that the others can't:
    config       the files, the record of training beside them, and the target must agree
    output       the independent model's output on a made-up input equals the trained drafter's
    logits       on real prompts, both implementations give the block the same logits
    decoding     full draft-verify decoding takes the same steps and gives the same text
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.errors import ExportError
from draftsmith.evaluate.decode import DecodeLimits, decode
from draftsmith.evaluate.drafting import Blocks, DraftContext
from draftsmith.evaluate.export import CONFIG, check_against_target, drafter_folder, load_zlab, read_json
from draftsmith.evaluate.probe import CONTEXT, RECORD, Probe, described, sketch
from draftsmith.evaluate.stepper import Stepper, TapHooks
from draftsmith.target.model import Target

TOLERANCE = 1e-3
"""Largest allowed difference relative to the largest value: far above fp32 rounding, far below any fault."""
PACKAGE = "dflash"

CAUSES: Mapping[str, str] = {
    "rope": "RoPE: theta or scaling was lost or changed on the way",
    "taps": "layer offset: other target layers are read than in training",
    "mask_token_id": "mask token: blocks are filled with a token that wasn't trained",
    "block_size": "block size: the drafter serves another block than it trained",
    "layer_types": "attention layout: full and sliding layers were exchanged",
    "sliding_window": "sliding window: another width than in training",
    "rms_norm_eps": "norm epsilon: another than in training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One look, what it found, and the likely cause where it failed."""

    name: str
    passed: bool
    detail: str
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All looks at one drafter."""

    drafter: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}" for check in self.checks]
        causes = list(dict.fromkeys(check.cause for check in self.checks if check.cause))
        if self.passed:
            lines.append(f"{self.drafter} serves as it trained.")
        else:
            lines.append(f"{self.drafter} would not serve as it trained. Likely cause: {'; '.join(causes)}.")
        return "\n".join(lines)


@torch.no_grad()
def verify(
    drafter: str | Path,
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 48,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Verdict:
    """Hold an exported drafter against independent code and its record of training.

    Args:
        drafter: folder or hub id in the z-lab layout. Without a record beside it (exported by others) what was
            trained is unknown, and the first two looks see less.
        target: in fp32 for a strict verdict.
        prompts: token ids of real prompts, template applied.
        max_new_tokens: of full decoding.
        template_kwargs: arguments those prompts were rendered with, compared with training's.

    Raises:
        ExportError: the package is absent, or the folder can't be read at all.
    """
    folder = drafter_folder(drafter)
    package = independent_code()
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    try:
        config, ours = load_zlab(folder)
        check_against_target(config, target.facts, CONFIG)
    except ExportError as error:
        failed = Check(
            name="config", passed=False, detail=str(error), cause=_cause_of(str(error).replace(str(folder), ""))
        )
        return Verdict(drafter=str(drafter), checks=(failed,))
    checks = [check_config(config, record, target, template_kwargs or {})]
    theirs: Any = package.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.to(target.device)
    ours.to(target.device)
    checks.append(check_output(theirs, config, record))
    checks.append(check_logits(theirs, ours, target, prompts))
    checks.append(check_decoding(package, theirs, ours, target, (prompts, max_new_tokens)))
    return Verdict(drafter=str(drafter), checks=tuple(checks))


def independent_code() -> Any:
    """The module `dflash.model`, with its clock made to work without CUDA.

    Raises:
        ExportError: not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise ExportError("verifying needs independent code: pip install --no-deps dflash==0.1.0")
    module: Any = importlib.import_module(f"{PACKAGE}.model")
    if not torch.cuda.is_available():
        # Its statistics synchronise CUDA for their timings, which nothing here reads.
        module._cuda_time = _no_clock
    return module


def _no_clock() -> float:
    return 0.0


def _cause_of(message: str) -> str:
    hints = {
        "give a complete one": "missing weight: engines would fill it with noise in silence",
        "mask token": CAUSES["mask_token_id"],
        "taps layers": CAUSES["taps"],
        "rope": CAUSES["rope"],
        "rotary": CAUSES["rope"],
        "block_size": CAUSES["block_size"],
        "causal": "causal flag: blocks would be seen another way than in training",
    }
    found = next((cause for hint, cause in hints.items() if hint in message), "")
    return found or "the folder doesn't describe a drafter of this target"


def check_config(
    config: DrafterConfig, record: Mapping[str, Any], target: Target, template_kwargs: Mapping[str, Any]
) -> Check:
    """The exported config against the record of training, or against the target where there is no record."""
    facts = target.facts
    if not record:
        if config.rope.theta != facts.rope_theta:
            detail = f"rope_theta {config.rope.theta}, but {facts.name} has {facts.rope_theta}"
            return Check(name="config", passed=False, detail=detail, cause=CAUSES["rope"])
        return Check(name="config", passed=True, detail=f"complete, fits {facts.name} (no record of training)")
    trained: dict[str, Any] = record["drafter"]
    for name, now in described(config).items():
        if now != trained[name]:
            cause = CAUSES.get(name, f"{name} was changed after training")
            return Check(name="config", passed=False, detail=f"{name} {now}, trained with {trained[name]}", cause=cause)
    rendering = record.get("template")
    if rendering is not None:
        now = {"hash": facts.template_hash, "kwargs": dict(template_kwargs)}
        if now != rendering:
            part = "chat template" if now["hash"] != rendering["hash"] else "template arguments"
            detail = f"{part} {now} differ from training's {rendering}"
            return Check(name="config", passed=False, detail=detail, cause=f"{part}: prompts are written another way")
    return Check(name="config", passed=True, detail=f"as trained, fits {facts.name}")


def check_output(theirs: Any, config: DrafterConfig, record: Mapping[str, Any]) -> Check:
    """The independent model on the made-up input against what the trained drafter gave."""
    if not record:
        return Check(name="output", passed=True, detail="skipped: no record of training beside the drafter")
    gap = _gap(independent_sketch(theirs, config), torch.tensor(record["probe"]))
    detail = f"differs from the trained drafter's by {gap:.1e} of its largest value"
    if gap <= TOLERANCE:
        return Check(name="output", passed=True, detail=detail)
    return Check(name="output", passed=False, detail=detail, cause=_diagnose(theirs, config, record))


def independent_sketch(theirs: Any, config: DrafterConfig) -> Tensor:
    """`sketch` of the independent model's output on the probe."""
    probe = Probe.of(config)
    device = theirs.fc.weight.device
    output = theirs(
        position_ids=torch.arange(CONTEXT + config.block_size, device=device)[None],
        noise_embedding=probe.block_BH[None].to(device),
        target_hidden=probe.features_TFH[None].to(device),
    )
    return torch.tensor(sketch(output[0]))


def _diagnose(theirs: Any, config: DrafterConfig, record: Mapping[str, Any]) -> str:
    """Try the known ways to go wrong backwards: the one that restores the trained output is the cause."""
    expected = torch.tensor(record["probe"])
    norms = [weight for name, weight in theirs.named_parameters() if "norm" in name]
    for shift, words in ((1.0, "w - 1 instead of w"), (-1.0, "1 + w instead of w")):
        for weight in norms:
            weight.add_(shift)
        repaired = _gap(independent_sketch(theirs, config), expected) <= TOLERANCE
        for weight in norms:
            weight.sub_(shift)
        if repaired:
            return f"norm convention: norm weights are stored as {words}"
    attentions = [layer.self_attn for layer in theirs.layers]
    before = [attention.is_causal for attention in attentions]
    for attention in attentions:
        attention.is_causal = not attention.is_causal
    repaired = _gap(independent_sketch(theirs, config), expected) <= TOLERANCE
    for attention, flag in zip(attentions, before, strict=True):
        attention.is_causal = flag
    if repaired:
        return "causal flag: blocks are seen another way than in training"
    return "weights: the file doesn't hold what was trained (damaged, stale or rounded to another dtype)"


def check_logits(theirs: Any, ours: Drafter, target: Target, prompts: Sequence[Sequence[int]]) -> Check:
    """Block logits of both implementations after each prompt; features by hooks here, by hidden_states there."""
    worst = 0.0
    for prompt in prompts:
        with TapHooks(target, ours.config.taps) as hooks:
            first = int(Stepper(target).run(prompt, last_only=True).argmax())
            context = DraftContext.start(ours, target.ends())
            context.extend(hooks.features()[0])
        size = ours.config.block_size
        blocks = Blocks.single(first, context.length, size, context.device)
        mine = context.logits(context.hidden(blocks)[0, 1:])
        worst = max(worst, _gap(independent_logits(theirs, target, prompt, first), mine))
    detail = f"block logits after {len(prompts)} prompts differ by at most {worst:.1e} of their largest value"
    cause = "" if worst <= TOLERANCE else "layer offset or embedding scale: independent code reads the target otherwise"
    return Check(name="logits", passed=worst <= TOLERANCE, detail=detail, cause=cause)


def independent_logits(theirs: Any, target: Target, prompt: Sequence[int], first: int) -> Tensor:
    """The `dflash` package's way from prompt to block logits, [B - 1, V]."""
    package = independent_code()
    ids = torch.tensor([list(prompt)], device=target.device)
    backbone: Any = target.anatomy.backbone
    states = backbone(input_ids=ids, output_hidden_states=True).hidden_states
    features = package.extract_context_feature(states, theirs.target_layer_ids)
    block = torch.full((1, theirs.block_size), theirs.mask_token_id, device=target.device)
    block[0, 0] = first
    scale = float(theirs.config.dflash_config.get("input_embedding_scale", 1.0))
    hidden = theirs(
        position_ids=torch.arange(len(prompt) + theirs.block_size, device=target.device)[None],
        noise_embedding=package._raw_input_embeddings(target.model, block, scale).float(),
        target_hidden=features.float(),
    )
    head = target.model.get_output_embeddings()
    return theirs.compute_logits(hidden[0, 1:].to(head.weight.dtype), head).float()


def check_decoding(
    package: Any, theirs: Any, ours: Drafter, target: Target, answers: tuple[Sequence[Sequence[int]], int]
) -> Check:
    """Steps, accepted tokens and text of full greedy decoding by both implementations.

    The package crops its target cache, so on targets with recurrent state it is no reference and isn't asked.
    """
    prompts, limit = answers
    if "linear_attention" in target.facts.layer_types:
        detail = "skipped: the independent loop can't take back the state of linear attention"
        return Check(name="decoding", passed=True, detail=detail)
    steps = accepted = 0
    for number, prompt in enumerate(prompts):
        limits = DecodeLimits(max_new_tokens=limit, stop_ids=target.facts.eos_token_ids)
        mine = decode(target, ours, target.ends(), prompt, limits)
        ids = torch.tensor([list(prompt)], device=target.device)
        stops = list(limits.stop_ids) or None
        other = package.dflash_generate(theirs, target.model, ids, limit, stops, return_stats=True)
        counts = [step.committed for step in mine.steps]
        their_counts = [int(count) for count in other.acceptance_lengths]
        text = [int(token) for token in other.output_ids[0, len(prompt) :]]
        if counts != their_counts or list(mine.token_ids) != text:
            part = "text" if counts == their_counts else "steps"
            detail = f"prompt {number}: other {part}; {sum(counts)} tokens in {len(counts)} steps here, "
            detail += f"{sum(their_counts)} in {len(their_counts)} by independent code"
            return Check(name="decoding", passed=False, detail=detail, cause="the loops differ: see the looks above")
        steps, accepted = steps + len(counts), accepted + sum(counts)
    tau = accepted / max(1, steps)
    detail = f"the same {steps} steps, {accepted} tokens and text on {len(prompts)} prompts (tau {tau:.2f})"
    return Check(name="decoding", passed=True, detail=detail)


def _gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite where shapes or finiteness differ."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    expected = expected.to(found.device)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
