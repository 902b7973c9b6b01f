"""How much acceptance does a GPU-minute buy? tau by the true draft-verify loop, ours against the rivals'.

    python bench/quality.py --data train.jsonl.gz --val val.jsonl.gz --minutes 1 --seeds 0 1 2 \
        --systems draftsmith speculators speculators-best specforge specforge-best --out quality.json --plot quality.png
    python bench/quality.py --data train.jsonl.gz --val val.jsonl.gz --minutes 1 --systems \
        --variant ce:weights=decay --variant random:init=random --variant one-draw:draws=1 --out ablations.json

The target (SmolLM2-135M-Instruct: acceptance on a target this small says little of a large one's) runs once; every
system then trains on the same features in device memory for `--minutes` of its own step loop, with its schedule laid
over the steps that this allows: a first instance, thrown away, compiles and is timed. Compiling, capturing and
measuring don't count. `--as-timed FILE` takes the time of a step from an earlier output instead, so that processes may
share a GPU: steps are then what the budget held when a line ran alone. Each result is exported as a z-lab drafter (the
rivals' weights by name), read back, and answers the same prompts by draftsmith's own loop, greedily. What the systems
are set to stands in contenders.py.

`--variant NAME:key=value,...` adds a line of its own: any setting of OursSettings, `layers`, `block`; with
`system=PRESET` first, of that preset (system=speculators-best,lr=0.001). The first line is what others are held
against. Results are written to `--out` after every run; `--merge` goes on from earlier outputs (other seeds, other
budgets), or, with an empty `--systems`, only makes their table and plot. On a CPU everything runs too, uncompiled: a
few tokens and `--minutes 0.05` show the way. The last line is one JSON object (`--out` holds every run besides).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, DEVICE, ON_GPU, PRESETS, Contender, Corpus, Variant, capture_corpus, make_variant
from rich.console import Console
from torch import Tensor

from draftsmith.data.prepare import PrepareConfig
from draftsmith.drafter.model import Drafter
from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, evaluate_prompts
from draftsmith.evaluate.export import export_zlab, load_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import Prompt, load_prompts
from draftsmith.pipeline.inputs import compute_dtype, load_data
from draftsmith.pipeline.settings import DataOptions
from draftsmith.records import Document
from draftsmith.target.model import Target, TargetConfig, load_target


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def load_documents(arguments: argparse.Namespace, target: Target) -> list[Document]:
    """The first training conversations, up to `--tokens` tokens."""
    data = load_data(DataOptions(data=arguments.data, hold_out=0), PrepareConfig(), target, None, Console(quiet=True))
    chosen: list[Document] = []
    left = arguments.tokens or sum(data.train.lengths)
    for index, length in enumerate(data.train.lengths):
        if length > left:
            break
        chosen.append(data.train[index])
        left -= length
    if not chosen:
        raise SystemExit(f"--tokens {arguments.tokens} holds no whole conversation")
    return chosen


def timed_steps(contender: Contender, steps: int) -> float:
    """Seconds that `steps` steps take; the host waits now and then, or it would run away from the device."""
    synchronize()
    started = time.perf_counter()
    for step in range(steps):
        contender.step()
        if step % 16 == 15:
            synchronize()
    synchronize()
    return time.perf_counter() - started


def seconds_a_step(variant: Variant, target: Target, corpus: Corpus, arguments: argparse.Namespace) -> float:
    """Of an instance that is thrown away: what it compiled serves the next ones."""
    contender = CONTENDERS[variant.system](variant, target, corpus, 0, 100_000)
    timed_steps(contender, arguments.warm_steps)
    return timed_steps(contender, arguments.warm_steps) / arguments.warm_steps


def measure(
    contender: Contender, target: Target, prompts: Sequence[Prompt], arguments: argparse.Namespace, name: str
) -> EvalResult:
    """Export, read back, answer the prompts."""
    info = ExportInfo.of(target.facts, target.ends())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.keep) / name if arguments.keep else Path(scratch) / "drafter"
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_zlab(Drafter(contender.config), contender.weights(), info, folder)
        _, drafter = load_zlab(folder)
    config = EvalConfig(
        prompts=(arguments.val,), max_new_tokens=arguments.max_new_tokens, plain=False, batch=arguments.batch
    )
    return evaluate_prompts(target, drafter.to(DEVICE, compute_dtype(ON_GPU)), prompts, config, name=name)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what, for how long, from which seed, and how long a step takes."""

    variant: Variant
    minutes: float
    seed: int
    seconds_a_step: float
    timed_elsewhere: bool = False
    """Whether the time of a step is an earlier run's: this one may share its GPU, and its own clock says nothing."""


def run(
    job: Job, target: Target, corpus: Corpus, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train one drafter for its time and measure it. `counts` are tokens committed and verify steps of each prompt."""
    variant, minutes, seed = job.variant, job.minutes, job.seed
    steps = max(2, int(minutes * 60 / job.seconds_a_step))
    contender = CONTENDERS[variant.system](variant, target, corpus, seed, steps)
    contender.step()  # outside the time: it may compile again
    seconds = timed_steps(contender, steps - 1)
    if job.timed_elsewhere:
        seconds = (steps - 1) * job.seconds_a_step
    name = f"{variant.name}-{minutes:g}min-seed{seed}"
    started = time.perf_counter()
    result = measure(contender, target, prompts, arguments, name)
    tau = result.summary.tau
    row = {
        "name": variant.name, "system": variant.system, "minutes": minutes, "seed": seed, "steps": steps,
        "seconds": seconds, "ms_a_step": 1e3 * seconds / (steps - 1), "tau": tau.value, "tau_low": tau.low,
        "tau_high": tau.high, "timed_elsewhere": job.timed_elsewhere, "survival": list(result.summary.survival),
        "num_prompts": result.summary.num_prompts,
        "counts": [[answer.decoded.committed, len(answer.decoded.steps)] for answer in result.answers],
        "measure_seconds": time.perf_counter() - started, **contender.facts(),
    }  # fmt: skip
    print(
        f"{name}: tau {tau} after {steps:,} steps in {seconds:.1f} s ({row['ms_a_step']:.2f} ms each), "
        f"{row['epochs']:.2f} epochs, measured in {row['measure_seconds']:.0f} s",
        flush=True,
    )
    return row


def tau_difference(mine: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """tau of all seeds pooled less the other's, with its 95% interval: prompts are resampled with all their seeds."""
    counts = [torch.tensor([row["counts"] for row in rows], dtype=torch.float64).sum(0) for rows in (mine, others)]
    picks = torch.randint(counts[0].shape[0], (2000, counts[0].shape[0]), generator=torch.Generator().manual_seed(0))

    def tau(sums: Tensor) -> Tensor:
        return sums[..., 0] / sums[..., 1].clamp(min=1)

    samples = tau(counts[0][picks].sum(1)) - tau(counts[1][picks].sum(1))
    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(tau(counts[0].sum(0)) - tau(counts[1].sum(0))), low, high


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per name and budget: tau over seeds, and the paired difference to the first name on the seeds of both."""
    lines: list[dict[str, Any]] = []
    for name, minutes in dict.fromkeys((row["name"], row["minutes"]) for row in rows):
        mine = {row["seed"]: row for row in rows if (row["name"], row["minutes"]) == (name, minutes)}
        first = {row["seed"]: row for row in rows if (row["name"], row["minutes"]) == (rows[0]["name"], minutes)}
        taus = [row["tau"] for row in mine.values()]
        line: dict[str, Any] = {
            "name": name, "minutes": minutes, "tau": statistics.mean(taus), "seeds": sorted(mine),
            "tau_min": min(taus), "tau_max": max(taus), "steps": statistics.mean(row["steps"] for row in mine.values()),
        }  # fmt: skip
        seeds = [seed for seed in mine if seed in first and name != rows[0]["name"]]
        if seeds:
            gap, low, high = tau_difference([mine[seed] for seed in seeds], [first[seed] for seed in seeds])
            line |= {"against": rows[0]["name"], "difference": gap, "low": low, "high": high}
        lines.append(line)
    return lines


def show(lines: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n135M target\n{'':24s} {'minutes':>8s} {'tau':>6s} {'over seeds':>14s} {'steps':>10s}  less the first [95%]"
    )
    for line in lines:
        spread = f"{line['tau_min']:.2f} .. {line['tau_max']:.2f}"
        figures = f"{line['minutes']:8g} {line['tau']:6.2f} {spread:>14s} {line['steps']:10,.0f}"
        gap = f"{line['difference']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}]" if "difference" in line else ""
        print(f"{line['name']:24s} {figures}  {gap}")


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """tau against the minutes really spent: a mark a run with its interval, a line through the means."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for index, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        mine = [row for row in rows if row["name"] == name]
        minutes, taus = [row["seconds"] / 60 for row in mine], [row["tau"] for row in mine]
        bounds = [[row["tau"] - row["tau_low"] for row in mine], [row["tau_high"] - row["tau"] for row in mine]]
        color = f"C{index}"
        axes.errorbar(minutes, taus, yerr=bounds, fmt="o", markersize=4, linewidth=1, alpha=0.5, color=color)
        groups = [
            [row for row in mine if row["minutes"] == budget] for budget in sorted({row["minutes"] for row in mine})
        ]
        spent = [statistics.mean(row["seconds"] for row in group) / 60 for group in groups]
        means = [statistics.mean(row["tau"] for row in group) for group in groups]
        axes.plot(spent, means, marker="D", color=color, label=name)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("minutes of training steps on one GPU")
    axes.set_ylabel("tau, draft-verify loop")
    axes.set_title("SmolLM2-135M target: tokens per verify step", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    found = [make_variant(name, name, {}, arguments.layers, arguments.block_size) for name in arguments.systems]
    for text in arguments.variant:
        name, _, settings = text.partition(":")
        options = dict(part.partition("=")[::2] for part in settings.split(",") if part)
        preset = options.pop("system", "draftsmith")
        found.append(make_variant(name, preset, options, arguments.layers, arguments.block_size))
    if len({variant.name for variant in found}) < len(found):
        raise SystemExit("two lines have one name: give each --variant a name of its own")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", default="", help="training conversations, or a folder from draftsmith prepare")
    parser.add_argument("--val", default="", help="prompts: a JSONL file, or a set by name")
    parser.add_argument("--systems", nargs="*", choices=sorted(PRESETS), default=["draftsmith"])
    parser.add_argument("--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...")
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0], help="budgets of the step loop")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=0, help="train on this many tokens; 0: all")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=100, help="prompts answered together")
    parser.add_argument("--warm-steps", type=int, default=60, help="steps to warm up, and as many to time")
    parser.add_argument(
        "--as-timed", nargs="*", type=Path, default=[], help="earlier outputs: their time of a step, to share a GPU"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="start no further run after this long; 0: all runs")
    parser.add_argument("--keep", default="", help="keep the exported drafters in this folder")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="outputs of earlier runs, to go on from")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if (arguments.systems or arguments.variant) and not (arguments.data and arguments.val):
        parser.error("give --data and --val, or neither systems nor variants and --merge")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return arguments


def prepare(arguments: argparse.Namespace, *, last_hidden: bool) -> tuple[Target, Corpus, list[Prompt], dict[str, Any]]:
    """The target, its features, the prompts, and what is to be said of them."""
    torch._dynamo.config.recompile_limit = 256  # one code object serves every variant
    if ON_GPU:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
    target = load_target(TargetConfig(target=arguments.target), DEVICE)
    documents, prompts = load_documents(arguments, target), load_prompts(arguments.val, arguments.prompts)
    started = time.perf_counter()
    corpus = capture_corpus(target, documents, last_hidden=last_hidden)
    synchronize()
    facts: dict[str, Any] = {
        "target": target.facts.name, "parameters": sum(p.numel() for p in target.model.parameters()),
        "documents": len(documents), "tokens": sum(corpus.lengths), "supervised": corpus.num_supervised,
        "capture_seconds": time.perf_counter() - started, "layers": arguments.layers, "block": arguments.block_size,
        "max_new_tokens": arguments.max_new_tokens, "torch": torch.__version__,
    }  # fmt: skip
    if ON_GPU:
        facts["gpu"] = torch.cuda.get_device_name()
    print(f"{facts['tokens']:,} tokens captured in {facts['capture_seconds']:.1f} s", flush=True)
    return target, corpus, prompts, facts


def speeds_of(files: Sequence[Path], names: Sequence[str]) -> dict[str, float]:
    """Seconds a step of each name in earlier outputs; empty without any.

    Raises:
        SystemExit: a name that no output has a run of, timed by its own clock.
    """
    if not files:
        return {}
    every = [row for file in files for row in json.loads(file.read_text())["runs"]]
    runs = [row for row in every if not row.get("timed_elsewhere")]
    found = {name: [row["ms_a_step"] / 1e3 for row in runs if row["name"] == name] for name in names}
    if missing := [name for name, times in found.items() if not times]:
        raise SystemExit(f"--as-timed: no timed run of {', '.join(missing)}")
    return {name: statistics.mean(times) for name, times in found.items()}


def train_all(arguments: argparse.Namespace, variants: Sequence[Variant], result: dict[str, Any]) -> None:
    """Every variant, budget and seed, added to `result` and written after each; seeds outermost, so that a run cut
    short has compared everything it did."""
    began = time.perf_counter()
    last_hidden = any(variant.reads_last_hidden for variant in variants)
    target, corpus, prompts, facts = prepare(arguments, last_hidden=last_hidden)
    result |= facts
    speeds = speeds_of(arguments.as_timed, [variant.name for variant in variants])
    for seed, minutes, variant in [(s, m, v) for s in arguments.seeds for m in arguments.minutes for v in variants]:
        name = variant.name
        if name in result["left_out"]:
            continue
        if arguments.seconds and time.perf_counter() - began > arguments.seconds:
            result["left_out"][f"{name}, {minutes:g} min, seed {seed}"] = f"not started after {arguments.seconds:g} s"
            continue
        try:
            if name not in speeds:
                speeds[name] = seconds_a_step(variant, target, corpus, arguments)
            job = Job(
                variant=variant, minutes=minutes, seed=seed, seconds_a_step=speeds[name],
                timed_elsewhere=bool(arguments.as_timed),
            )  # fmt: skip
            row = run(job, target, corpus, prompts, arguments)
        except RuntimeError as error:  # absent, out of memory, or a rival's own failure on this version of torch
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            result["left_out"][name] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
            print(f"{name}: {result['left_out'][name]}", flush=True)
            continue
        finally:
            gc.collect()
        result["runs"].append(row)
        result["table"], result["seconds"] = table(result["runs"]), time.perf_counter() - began
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def one_meaning(known: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[str]]:
    """Settings of both by name.

    Raises:
        SystemExit: a name that stands for other settings in the other.
    """
    if unlike := [name for name in known.keys() & more.keys() if known[name] != more[name]]:
        raise SystemExit(f"{', '.join(sorted(unlike))}: other settings than in the merged output; rename one")
    return known | more


def main() -> None:
    arguments = parse()
    variants = variants_of(arguments)
    result: dict[str, Any] = {"runs": [], "settings": {}}
    for file in arguments.merge:
        earlier = json.loads(file.read_text())
        settings = one_meaning(result["settings"], earlier["settings"])
        result = result | earlier | {"runs": result["runs"] + earlier["runs"], "settings": settings}
    result["left_out"] = {}
    mine = {variant.name: [str(part) for part in variant.parts] for variant in variants}
    result["settings"] = one_meaning(result["settings"], mine)
    if variants:
        train_all(arguments, variants, result)
    result["table"] = table(result["runs"])
    show(result["table"])
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot and result["runs"]:
        draw(result["runs"], arguments.plot)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))


if __name__ == "__main__":
    main()
