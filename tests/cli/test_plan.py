from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from draftsmith.cli.plan import PlanCommand, configure_plan, job_of, plan, plan_of, plan_toml
from draftsmith.cli.train import configure
from draftsmith.config import build_config, merge
from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.workload import drafter_parameters

RECIPES = Path(__file__).parents[2] / "recipes"
HARDWARE = {
    "quickstart": "rtx4090",
    "quickstart-scratch": "rtx4090",
    "smollm2-gpu": "rtx4090",
    "qwen3-8b-1gpu": "h100",
    "adapt-stock-drafter": "h100",
    "qwen3-8b-8gpu": "8xh100",
    "qwen3.6-27b-5t2d": "7x96GB",
}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_is_planned_quickly_and_fits_its_hardware(path: Path) -> None:
    name = path.name.removesuffix(".toml")
    hosts = ["--hosts", "2"] if name.endswith("2node") else []
    hardware = HARDWARE.get(name, "8xh100")
    started = time.process_time()
    made = plan_of(configure_plan(["--recipe", str(path), "--hardware", hardware, *hosts]))
    assert time.process_time() - started < 5
    assert made.fits, made.remarks()
    assert made.split.rate > 0


HEAVY = (
    "accelerate",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
)
"""Each takes a good part of a second or more to import, and a plan has no use for any."""


@pytest.mark.parametrize("recipe", ["quickstart", "qwen3-8b-1gpu", "qwen3.6-27b-5t2d"])
def test_a_plan_imports_nothing_that_takes_long(recipe: str) -> None:
    """What keeps the whole process within its seconds, told without a clock."""
    arguments = ["plan", "--recipe", str(RECIPES / f"{recipe}.toml"), "--hardware", HARDWARE[recipe]]
    code = f"""import sys
from draftsmith.cli import run
status = run({arguments})
print("imported:", *sorted(set({HEAVY}) & set(sys.modules)))
sys.exit(status)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def test_the_27b_recipe_is_the_reference_shape() -> None:
    job = job_of(configure_plan(["--recipe", str(RECIPES / "qwen3.6-27b-5t2d.toml"), "--hardware", "7x96GB"]))
    assert (job.shape.num_tokens, job.num_anchors, job.drafter.block_size) == (49_152, 1024, 16)
    assert job.drafter.taps == (1, 16, 31, 46, 61)
    assert drafter_parameters(job.drafter) == pytest.approx(1.73e9, rel=0.001)
    assert job.target.total == pytest.approx(26.9e9, rel=0.01)


def test_a_bare_target_follows_what_train_would_choose() -> None:
    job = job_of(
        configure_plan(["--target", "configs/qwen3-8b", "--hardware", "h100", "--loss", "kl", "--anchors", "512"])
    )
    assert (job.shape.num_tokens, job.num_anchors, job.drafter.num_layers) == (49_152, 512, 5)
    assert job.shape.last_hidden
    assert job.corpus.tokens == 200_000_000


def test_the_saved_plan_is_a_recipe_that_train_reads(tmp_path: Path) -> None:
    saved = tmp_path / "plan.toml"
    arguments = ["--target", "configs/qwen3-8b", "--hardware", "8xh100", "--save", str(saved)]
    assert plan(arguments) == 0
    made = plan_of(configure_plan(arguments))
    config, _ = configure(["--plan", str(saved), "--data", "x.jsonl"], "train", "")
    assert config.target.target == "configs/qwen3-8b"
    assert config.batch.draws_per_batch == made.job.draws_per_batch
    assert config.batch.anchors == made.job.num_anchors
    assert config.pipeline.colocate == made.split.joint
    if not made.split.joint:
        assert (config.pipeline.targets, config.pipeline.drafters) == (made.split.targets, made.split.drafters)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_a_saved_recipe_is_the_recipe_with_what_was_decided(path: Path, tmp_path: Path) -> None:
    """`train --plan` alone runs what was planned: everything that the recipe and the flags said stands in it."""
    name = path.name.removesuffix(".toml")
    flags = ["--checkpoint-layers", "--seed", "7", "--hardware", HARDWARE.get(name, "8xh100"), "--data", "chats.jsonl"]
    hosts = ["--hosts", "2"] if name.endswith("2node") else []
    command = configure_plan(["--recipe", str(path), *flags, *hosts])
    made = plan_of(command)
    saved = tmp_path / "plan.toml"
    saved.write_text(plan_toml(command, made))
    config, _ = configure(["--plan", str(saved)], "train", "")
    run = command.run
    for part in ("out", "target", "data", "answers", "prepare", "on_policy", "loss", "optim", "measure", "checkpoint"):
        assert getattr(config, part) == getattr(run, part), part
    assert config.batch == replace(
        run.batch,
        token_budget=made.job.shape.num_tokens,
        anchors=made.job.num_anchors,
        draws_per_batch=made.job.draws_per_batch,
    )
    assert config.drafter.mask_token_id == run.drafter.mask_token_id
    assert config.pipeline.device != "cpu", "a plan is for GPUs"
    roles = ("targets", "drafters", "colocate", "device")
    for option in fields(run.pipeline):
        if option.name not in roles:
            assert getattr(config.pipeline, option.name) == getattr(run.pipeline, option.name), option.name
    assert job_of(replace(command, run=config)) == replace(made.job, draws=made.job.draws_per_batch)


def test_an_assumption_stands_in_the_file_that_rests_on_it() -> None:
    command = configure_plan(["--target", "configs/qwen3-8b", "--hardware", "h100"])
    text = plan_toml(command, plan_of(command))
    assert "# data assumed: 200M tokens, 60% supervised; without draws_per_batch" in text
    assert "data" not in tomllib.loads(text), "nobody named any"


def test_a_plan_lies_over_the_recipe_it_was_made_from(tmp_path: Path) -> None:
    saved = tmp_path / "plan.toml"
    saved.write_text("[batch]\nanchors = 64\n")
    recipe = str(RECIPES / "qwen3-8b-1gpu.toml")
    config, _ = configure(["--recipe", recipe, "--plan", str(saved)], "train", "")
    assert (config.batch.anchors, config.batch.accumulation) == (64, 4)


def test_the_saved_plan_has_the_drafter_that_was_planned(tmp_path: Path) -> None:
    saved = tmp_path / "plan.toml"
    sizes = ["--num-heads", "16", "--num-kv-heads", "4", "--head-dim", "64", "--intermediate-size", "4096"]
    arguments = ["--target", "configs/qwen3-8b", *sizes, "--init", "random", "--hardware", "h200", "--save", str(saved)]
    assert plan(arguments) == 0
    smaller, usual = (drafter_parameters(job_of(configure_plan(each)).drafter) for each in (arguments, arguments[:2]))
    # Five layers of 4096 x (2 x 1024 + 2 x 256 + 3 x 4096), fc of five taps, norms of heads, layers and context.
    assert smaller == 5 * (4096 * 14_848 + 2 * 4096 + 2 * 64) + 5 * 4096**2 + 2 * 4096
    assert usual > smaller
    options = configure(["--plan", str(saved), "--data", "x.jsonl"], "train", "")[0].drafter
    assert (options.num_heads, options.num_kv_heads, options.head_dim, options.intermediate_size) == (16, 4, 64, 4096)
    assert (options.init, options.rope) == ("random", "target")


def test_a_plan_of_an_existing_drafter_leaves_it_its_architecture() -> None:
    command = configure_plan(["--recipe", str(RECIPES / "adapt-stock-drafter.toml"), "--hardware", "h100"])
    tables = tomllib.loads(plan_toml(command, plan_of(command)))
    assert tables["drafter"] == {"init_from": "z-lab/Qwen3-8B-DFlash-b16"}
    build_config(merge(tables, {"data": {"data": "x.jsonl"}}), "the plan")


def test_one_gpu_is_saved_without_roles() -> None:
    command = configure_plan(["--target", "configs/qwen3-8b", "--hardware", "h200", "--data", "mine.jsonl"])
    tables = tomllib.loads(plan_toml(command, plan_of(command)))
    assert "pipeline" not in tables
    assert tables["data"] == {"data": "mine.jsonl"}


def test_an_8b_drafter_of_three_layers_trains_from_disk_on_24_gb() -> None:
    flags = [
        "--features",
        "features",
        "--layers",
        "3",
        "--token-budget",
        "8192",
        "--anchors",
        "256",
        "--hardware",
        "rtx4090",
    ]
    command = configure_plan(["--target", "configs/qwen3-8b", *flags])
    made = plan_of(command)
    assert made.fits
    tables = tomllib.loads(plan_toml(command, made))
    assert tables["data"] == {"features": "features"}
    assert tables["pipeline"] == {"drafters": 1}


def test_what_doesnt_fit_ends_with_1() -> None:
    assert plan(["--target", "Qwen/Qwen3.6-27B", "--hardware", "rtx3090"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "h100"], "no target to plan for"),
        (["--target", "smollm2"], "either --hardware"),
        (["--target", "smollm2", "--hardware", "h100", "--tokens", "0"], "--tokens 0 is not 1 or more"),
        (["--target", "smollm2", "--hardware", "a100", "--target-compute", "fp8"], "a100 has no 8-bit products: drop"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(arguments)


def test_a_share_is_between_0_and_1() -> None:
    run = configure_plan(["--target", "smollm2", "--hardware", "h100"]).run
    with pytest.raises(ConfigError, match="--supervised-share 0 is not between 0 and 1"):
        PlanCommand(run=run, hardware="h100", supervised_share=0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cpu"], "this plan is for the GPUs of --hardware"),
        (["--cache-features"], "planned as if the target ran in every epoch"),
        (["--init-from", "smollm2-drafter"], "planned as 2 layers, block 8"),
        (["--device-map", "auto"], "planned as one target on each GPU"),
    ],
)
def test_what_a_plan_leaves_out_is_said(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--target", "smollm2", "--hardware", "h100"]) == 0
    assert says not in " ".join(capsys.readouterr().out.split())
    assert plan(["--target", "smollm2", "--hardware", "h100", *flags]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


SAYS_ITS_PLAN = [path for path in sorted(RECIPES.glob("*.toml")) if "# Plan, " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", SAYS_ITS_PLAN, ids=lambda path: path.name)
def test_what_a_recipe_says_of_its_plan_is_what_the_plan_says(path: Path) -> None:
    name = path.name.removesuffix(".toml")
    hosts = ["--hosts", "2"] if name.endswith("2node") else []
    made = plan_of(configure_plan(["--recipe", str(path), "--hardware", HARDWARE.get(name, "8xh100"), *hosts]))
    comment = " ".join(line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines()[:10])
    said = comment.partition("Plan, ")[2].partition(" hours")[0]
    memory = [int(found) for found in re.findall(r"(\d+) GB", said)]
    assert memory == [round(role.total / 1e9) for role in made.split.memory]
    rate, hours = re.findall(r"([\d,]+) tokens/s", said), re.findall(r"([\d.]+)$", said)
    assert [float(found.replace(",", "")) for found in rate] == [pytest.approx(made.split.rate, rel=0.01)]
    assert [float(found) for found in hours] == [pytest.approx(made.hours, rel=0.02)]
    for found in re.findall(r"drafters idle (\d+)%", said):
        assert int(found) == round(100 * made.split.idle_drafters)


def test_a_measured_machine_counts_for_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.cli.plan.this_machine", lambda link: parse_hardware("2xh100", link_gbps=link))
    made = plan_of(configure_plan(["--target", "smollm2", "--measure", "--hosts", "3", "--link-gbps", "100"]))
    assert (made.hardware.num_gpus, made.hardware.link_gbps) == (6, 100)
