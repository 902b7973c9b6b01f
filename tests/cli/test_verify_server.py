"""`draftsmith verify --server`: the verdict and its exit status, against an engine on a real socket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.cli import run
from draftsmith.evaluate.export import export_zlab
from draftsmith.evaluate.layout import ExportInfo
from tests.evaluate.engine import Engine, running
from tests.evaluate.overfit import overfit, random_drafter
from tests.families import save_tiny


def test_the_exit_status_says_whether_the_server_drafts_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = overfit("llama")
    target = str(save_tiny("llama", tmp_path / "target"))
    info = ExportInfo.of(case.target.facts, case.target.ends())
    drafter = str(export_zlab(case.drafter, None, info, tmp_path / "drafter", torch.float32))
    common = ["verify", drafter, "--target", target, "--num-prompts", "2", "--max-new-tokens", "12", "--device", "cpu"]
    with running(Engine(target=case.target, drafter=case.drafter)) as url:
        assert run([*common, "--server", url, "--tolerance", "0"]) == 0
    assert "accepted drafts, prompt by prompt" in " ".join(capsys.readouterr().out.split())
    other = random_drafter(case.drafter.config)
    with running(Engine(target=case.target, drafter=other, width=3)) as url:
        assert run([*common, "--server", url]) == 1
    assert "Likely cause: block size" in " ".join(capsys.readouterr().out.split())
    assert run([*common, "--server", "http://127.0.0.1:9"]) == 2
