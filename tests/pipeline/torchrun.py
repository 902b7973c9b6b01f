"""Starts tests/pipeline/rank_main.py under torchrun and waits, with a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.pipeline.tiny import Sizes

ROOT = Path(__file__).parents[2]


Done = subprocess.CompletedProcess[str]


def torchrun(ranks: int, arguments: list[str], *, seconds: float, restarts: int = 0) -> Done:
    """Run torchrun on one host; its output and exit status."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(f"--max-restarts={restarts}", "--monitor-interval=0.2"),
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def run_ranks(out: Path, sizes: Sizes, fault: str = "", *, seconds: float = 120) -> Done:
    script = str(ROOT / "tests" / "pipeline" / "rank_main.py")
    arguments = [script, str(out), json.dumps(asdict(sizes)), fault]
    return torchrun(sizes.targets + sizes.drafters, arguments, seconds=seconds)


def endings(out: Path) -> dict[int, str]:
    """How each rank that could say so ended."""
    return {int(path.stem.removeprefix("rank-")): path.read_text() for path in sorted(out.glob("rank-*.txt"))}
