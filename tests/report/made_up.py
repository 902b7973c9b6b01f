"""Folders as runs leave them, with numbers made by a formula: what a report reads, without training anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PLACES = 7


def summary(tau: float, plain: float | None = 20.0) -> dict[str, Any]:
    survival = [0.7 ** (k * 3 / tau) for k in range(1, PLACES + 1)]
    return {
        "num_prompts": 12, "num_steps": 200, "num_tokens": 700,
        "tau": {"value": tau, "low": tau - 0.15, "high": tau + 0.2},
        "tau_per_response": tau + 0.05, "survival": survival, "conditional": survival,
        "tokens_per_second": 30.0, "plain_tokens_per_second": plain, "num_identical": 12, "num_ties": 0,
        "speedup": None if plain is None else 30.0 / plain, "identical": "yes",
    }  # fmt: skip


def train_line(step: int, speed: float) -> dict[str, Any]:
    done = 1 - math.exp(-step * speed / 200)
    survival = [(0.2 + 0.6 * done) ** k for k in range(1, PLACES + 1)]
    return {
        "kind": "train", "step": step, "time": 1.8e9 + 3 * step / speed, "loss": 5 - 3 * done, "ce": 5.5 - 3.5 * done,
        "numerator": 1.0, "denominator": 1.0, "labels": 15000.0 * (10 if step else 1), "accuracy": 0.5,
        "place_labels": [2000.0] * PLACES, "place_accuracy": survival, "place_survival": survival,
        "uniform_tau": 1 + sum(survival), "lr": 1e-3, "grad_norm": 1 / (1 + step / 50), "skipped": 0, "empty": 0,
        "batch": step, "draws": step, "steps_per_s": speed / 3, "tokens_per_s": 12000.0 * speed,
        "labels_per_s": 40000.0 * speed * (0.6 if step % 100 == 0 else 1), "step_ms": 3000 / speed,
    }  # fmt: skip


def gpu(index: int, step: int, told: bool) -> dict[str, Any]:
    """As a log line has it: `told` where the driver answers, null before its first sample."""
    line: dict[str, Any] = {
        "allocated_bytes": 40e9 + index * 1e10, "reserved_bytes": 60e9 + index * 1e10, "peak_bytes": 62e9 + index * 1e10
    }  # fmt: skip
    if told:
        share = None if step < 20 else (0.97, 0.74, 0.88)[index % 3] - (0.4 if step % 100 == 0 else 0.0)
        line |= {"utilisation": share, "used_bytes": 63e9 + index * 1e10}
    return line


def system_line(step: int, speed: float, gpus: int, told: bool) -> dict[str, Any]:
    target = {"busy": 0.82, "waiting_input": 0.0, "waiting_room": 0.18, "tokens_per_s": 9000.0, "padding": 0.05}
    drafter = {"busy": 0.97, "waiting_input": 0.03, "waiting_room": 0.0, "tokens_per_s": 20000.0, "padding": 0.0}
    line: dict[str, Any] = {
        "kind": "system", "step": step, "time": 1.8e9 + 3 * step / speed,
        "workers": {"target 0": target, "target 1": target, "drafter 0": drafter}, "queue_depth": [2],
    }  # fmt: skip
    if gpus:
        line["gpus"] = {f"cuda:{index}": gpu(index, step, told) for index in range(gpus)}
    return line


def write_run(folder: Path, *, speed: float = 1.0, gpus: int = 0, told: bool = True, evaluated: bool = True) -> Path:
    """A run of 400 steps with two evaluations on the way."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(10, 401, 10):
        lines += [train_line(step, speed), system_line(step, speed, gpus, told)]
        if step in (100, 300) and evaluated:
            lines.append({"kind": "eval", "step": step, "time": 1.8e9, **summary(1.6 + step * speed / 300)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "out": str(folder),
        "target": {"target": "smollm2", "dtype": "auto"},
        "data": {"data": "chats <b>.jsonl", "hold_out": 8},
        "prepare": {"tokenize": {"max_length": 4096, "template_kwargs": {"enable_thinking": False}}},
        "drafter": {"taps": [1, 8, 14], "layers": 2},
        "pipeline": {"colocate": True, "ring_slots": 2},
        "batch": {"mixed": False, "epochs": 6.0},
        "resume": False,
    }
    resolved = {
        "target": {"name": "smollm2"}, "gpus": "2 target(s) on cuda:0, cuda:1", "threads": 1,
        "architecture": {"layer_types": ["full"] * 2, "block_size": 8, "taps": [1, 8, 14], "mask_token_id": 5},
        "objective": {"loss": "ce", "weights": "dpace", "gamma": 4.0},
        "batching": {
            "num_anchors": 512, "draws_per_batch": 5, "total_steps": 400, "buckets": [64, 128],
            "order": {"token_budget": 16384, "seed": 0},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"config": config, "resolved": resolved}))
    if evaluated:
        after = {"summary": summary(3.0), "groups": {"code": summary(3.4), "chat": summary(2.6)}}
        body = {"before": {"summary": summary(1.5), "groups": {"chat": summary(1.5)}}, "after": after}
        (folder / "evaluation.json").write_text(json.dumps(body))
    (folder / "data").mkdir()
    account = {
        "rows_in": 100, "rows_kept": 97, "documents": 97, "documents_cut": 1, "tokens": 20000,
        "supervised_tokens": 12000, "whole_tokens": 20000, "total_tokens": 20000,
        "skipped": {"no assistant turn": 3}, "turns_left_out": {"cut": 1},
        "template_arguments": {"{}": 97}, "examples": {},
    }  # fmt: skip
    (folder / "data" / "account.json").write_text(json.dumps({"account": account}))
    checkpoint = folder / "checkpoints" / "step-00000400"
    checkpoint.mkdir(parents=True)
    meta = json.dumps({"versions": {"torch": "2.13.0", "draftsmith": "0.1.0"}}, indent=1)
    (checkpoint / "meta.json").write_text(f'{meta}\n{{"sha256": "x"}}\n')
    return folder
