"""Ways to adapt a drafter to a new kind of text: what each gains there, and what it loses where it came from.

    draftsmith regenerate questions.jsonl --target smollm2 --out answers.jsonl --max-new-tokens 160 --temperature 0
    python bench/adapt.py --data answers.jsonl --new new.jsonl --old old.jsonl --steps 80 --seeds 0 1

All ways take the same steps over the same features, captured once, and differ in what may move:

    full      every weight
    frozen    all but `fc` and `hidden_norm`: what a layer reads of the context then never changes, and a token's
              features could be kept as one vector of H instead of F x H
    low-rank  W + B A for every matrix, rank `--rank`, nothing else; B starts at 0 (arXiv 2106.09685)
    scratch   a new drafter of the same architecture that starts from the target

`start` is the drafter as it came. tau by the draft-verify loop, greedily, on held-out prompts of both kinds; the
difference to the start is paired by prompt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contenders import DEVICE, ON_GPU, Corpus, Ours, OursSettings, Variant, capture_corpus
from quality import load_documents, tau_difference
from torch import Tensor

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.evaluate.acceptance import EvalConfig, evaluate_prompts
from draftsmith.evaluate.export import export_zlab, load_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import load_prompts
from draftsmith.evaluate.source import open_drafter
from draftsmith.pipeline.inputs import compute_dtype
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.optim import learning_rate

WAYS = ("full", "frozen", "low-rank", "scratch")
CONTEXT = ("fc.weight", "hidden_norm.weight")


class Adapting(Ours):
    """draftsmith's step from the weights of a given drafter."""

    origin: Drafter

    def choose(self, variant: Variant, target: Target) -> DrafterConfig:
        return self.origin.config

    def start(self, settings: OursSettings, target: Target, seed: int) -> Drafter:
        drafter = Drafter(self.config)
        drafter.load_state_dict(self.origin.state_dict())
        return drafter

    def moving(self) -> int:
        """Elements that may change."""
        return sum(piece.shape.numel() for piece in self.state.parameters.slices)


class Scratch(Adapting):
    def start(self, settings: OursSettings, target: Target, seed: int) -> Drafter:
        return Ours.start(self, settings, target, seed)


class Frozen(Adapting):
    """Gradients of `fc` and `hidden_norm` are zeroed before the update: AdamW without decay then leaves both alone."""

    def step(self) -> None:
        self.accumulate()
        flat = self.state.parameters
        named = flat.named(flat.grad_N)
        for name in CONTEXT:
            named[name].zero_()
        self.stepper.update()
        self.count += 1

    def moving(self) -> int:
        return sum(piece.shape.numel() for piece in self.state.parameters.slices if piece.name not in CONTEXT)


class LowRank(Adapting):
    """Matrices move by a product of two thin ones, trained by AdamW at the same schedule; norms stay."""

    rank = 16
    scale = 2.0
    """B A counts twice, as the method's authors and most users have it (alpha = 2 rank)."""

    def __init__(self, variant: Variant, target: Target, corpus: Corpus, seed: int, total_steps: int) -> None:
        super().__init__(variant, target, corpus, seed, total_steps)
        flat, generator = self.state.parameters, torch.Generator().manual_seed(seed)
        self.base = {n: w.clone() for n, w in flat.named(flat.master_N).items() if w.ndim == 2}
        self.thin: dict[str, tuple[Tensor, Tensor]] = {}
        for name, weight in self.base.items():
            a = torch.randn(self.rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
            b = torch.zeros(weight.shape[0], self.rank)
            self.thin[name] = (b.to(DEVICE), a.to(DEVICE))
        pairs = [tensor for pair in self.thin.values() for tensor in pair]
        self.adamw = torch.optim.AdamW(pairs, lr=self.state.optimizer.config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.total_steps = total_steps

    def step(self) -> None:
        self.accumulate()
        state, flat = self.state, self.state.parameters
        gradients, masters = flat.named(flat.grad_N), flat.named(flat.master_N)
        for name, (b, a) in self.thin.items():
            gradient = gradients[name] / state.sums[1]
            b.grad, a.grad = self.scale * gradient @ a.T, self.scale * b.T @ gradient
        self.count += 1
        now = torch.tensor(self.count)
        self.adamw.param_groups[0]["lr"] = float(learning_rate(state.optimizer.config, now, self.total_steps))
        torch.nn.utils.clip_grad_norm_([tensor for pair in self.thin.values() for tensor in pair], 1.0)
        self.adamw.step()
        for name, (b, a) in self.thin.items():
            masters[name].copy_(self.base[name] + self.scale * b @ a)
        flat.publish()
        flat.grad_N.zero_()
        state.sums.zero_()

    def moving(self) -> int:
        return sum(b.numel() + a.numel() for b, a in self.thin.values())


CLASSES: dict[str, type[Adapting]] = {"full": Adapting, "frozen": Frozen, "low-rank": LowRank, "scratch": Scratch}


def measure(
    drafter: Drafter, target: Target, arguments: argparse.Namespace, weights: dict[str, Tensor] | None
) -> dict[str, Any]:
    """tau on both prompt sets, of the exported drafter read back."""
    if weights is not None:
        with tempfile.TemporaryDirectory() as folder:
            export_zlab(Drafter(drafter.config), weights, ExportInfo.of(target.facts, target.ends()), Path(folder))
            _, drafter = load_zlab(folder)
    drafter = drafter.to(DEVICE, compute_dtype(ON_GPU))
    found: dict[str, Any] = {}
    for kind, source in (("new", arguments.new), ("old", arguments.old)):
        config = EvalConfig(
            prompts=(source,), max_new_tokens=arguments.max_new_tokens, plain=False, batch=arguments.batch
        )
        result = evaluate_prompts(target, drafter, load_prompts(source, arguments.prompts), config, name=kind)
        tau = result.summary.tau
        counts = [[answer.decoded.committed, len(answer.decoded.steps)] for answer in result.answers]
        found[kind] = {"tau": tau.value, "low": tau.low, "high": tau.high, "counts": counts}
    return found


def run(way: str, seed: int, target: Target, corpus: Corpus, arguments: argparse.Namespace) -> dict[str, Any]:
    lr = arguments.lr * (arguments.low_rank_lr if way == "low-rank" else 1.0)
    settings = OursSettings(lr=lr, draws=1, anchors=arguments.anchors, tokens=arguments.token_budget)
    start = Adapting.origin.config
    variant = Variant(name=way, system="draftsmith", layers=start.num_layers, block=start.block_size, parts=(settings,))
    contender = CLASSES[way](variant, target, corpus, seed, arguments.steps)
    started = time.perf_counter()
    for _ in range(arguments.steps):
        contender.step()
    if ON_GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {"way": way, "seed": seed, "seconds": seconds, "moving": contender.moving(), "lr": lr}
    return row | measure(Adapting.origin, target, arguments, contender.weights())


def gap(rows: list[dict[str, Any]], start: dict[str, Any], kind: str) -> str:
    difference, low, high = tau_difference([row[kind] for row in rows], [start[kind]] * len(rows))
    return f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"


def show(rows: list[dict[str, Any]], start: dict[str, Any]) -> None:
    print(f"\n{'':10s} {'moving':>12s} {'seconds':>8s} {'tau new':>8s} {'less the start':>22s} {'tau old':>8s}")
    print(f"{'start':10s} {0:12,} {0:8.0f} {start['new']['tau']:8.2f} {'':22s} {start['old']['tau']:8.2f}")
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        print(
            f"{way:10s} {mine[0]['moving']:12,} {mean([row['seconds'] for row in mine]):8.0f} "
            f"{mean([row['new']['tau'] for row in mine]):8.2f} {gap(mine, start, 'new'):>22s} "
            f"{mean([row['old']['tau'] for row in mine]):8.2f} {gap(mine, start, 'old'):>22s}",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--start", default="smollm2-drafter", help="the drafter to adapt")
    parser.add_argument("--data", required=True, help="conversations of the new kind, answered by the target")
    parser.add_argument("--new", required=True, help="held-out prompts of the new kind")
    parser.add_argument("--old", required=True, help="prompts of the kind that the drafter came from")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--low-rank-lr", type=float, default=1.0, help="times --lr")
    parser.add_argument("--tokens", type=int, default=0, help="train on this many tokens; 0: all")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="prompts answered together")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    LowRank.rank = arguments.rank
    if ON_GPU:
        torch._dynamo.config.recompile_limit = 256
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
    target = load_target(TargetConfig(target=arguments.target), DEVICE)
    Adapting.origin = open_drafter(arguments.start).drafter
    corpus = capture_corpus(target, load_documents(arguments, target), Adapting.origin.config.taps)
    start = measure(Adapting.origin, target, arguments, None)
    print(f"start: new {start['new']['tau']:.2f}, old {start['old']['tau']:.2f}", flush=True)
    Adapting.origin = Adapting.origin.to("cpu", torch.float32)
    result: dict[str, Any] = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "tokens": sum(corpus.lengths), "documents": len(corpus.lengths), "start": start, "runs": [],
    }  # fmt: skip
    for seed in arguments.seeds:
        for way in arguments.ways:
            result["runs"].append(run(way, seed, target, corpus, arguments))
            row = result["runs"][-1]
            print(f"{way}, seed {seed}: new {row['new']['tau']:.2f}, old {row['old']['tau']:.2f}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result["runs"], start)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))


if __name__ == "__main__":
    main()
