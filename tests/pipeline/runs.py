"""Tiny whole runs: a target folder, chats, and a configuration of eight steps."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from draftsmith.pipeline.inputs import claim_folder
from draftsmith.pipeline.run import prepare_stage
from draftsmith.pipeline.settings import BatchOptions, DataOptions, DrafterOptions, MeasureOptions, PipelineConfig
from draftsmith.pipeline.stage import RunConfig, Stage, load_inputs
from draftsmith.target.model import TargetConfig
from draftsmith.train.metrics import MetricsConfig
from tests.families import save_tiny


def quiet() -> Console:
    return Console(file=io.StringIO())


def write_inputs(folder: Path) -> RunConfig:
    """A tiny target and 40 short chats in `folder`, and a run of eight steps on them."""
    save_tiny("qwen3", folder / "target")
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(40):
            turns = [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"{n} and {n + 1}. " * 3},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return RunConfig(
        out="",
        target=TargetConfig(target=str(folder / "target")),
        data=DataOptions(data=str(folder / "chats.jsonl")),
        drafter=DrafterOptions(taps=(1, 4)),
        batch=BatchOptions(token_budget=512, anchors=16, max_steps=8, draws_per_batch=3, accumulation=2),
        pipeline=PipelineConfig(device="cpu", targets=1, drafters=1, stall_seconds=30),
        measure=MeasureOptions(eval_every=3),
        metrics=MetricsConfig(log_every=1),
    )


def stage_in(config: RunConfig, out: Path, *, resume: bool = False) -> Stage:
    here = replace(config, out=str(out), resume=resume)
    run = claim_folder(out, resume=resume)
    return prepare_stage(here, run, load_inputs(here, run, quiet()), quiet())


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
