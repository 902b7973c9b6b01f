"""What the ranks of a distributed run agree on before, between and after training: folder, data, start, measures.

The first drafter (the chief) owns the run's folder, which every host must see. It claims the folder, prepares the
data, decides where to start; the others wait for its word. The first target measures drafters for it; where no rank
is a target alone, the chief has one itself.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import Tensor

from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.pipeline.assemble import Blueprint, Team, build_targets
from draftsmith.pipeline.buffers import FeatureRing
from draftsmith.pipeline.distributed import receive_weights, send_weights
from draftsmith.pipeline.inputs import claim_folder, write_whole
from draftsmith.pipeline.producing import Producer
from draftsmith.pipeline.ranks import DrafterRank, Feeder, TargetRank, placement_of
from draftsmith.pipeline.session import AfterStep, Requests, Signals, blueprint_of, continue_from
from draftsmith.pipeline.stage import Inputs, RunConfig, Stage, load_inputs, measures
from draftsmith.pipeline.store import ShardReadLoop
from draftsmith.pipeline.world import World
from draftsmith.train.checkpoint import Checkpoint, checkpoint_folders, load_checkpoint

LAUNCH = "launch.json"
Weights = Mapping[str, Tensor]


def claim_together(world: World, config: RunConfig) -> tuple[Path, RunConfig]:
    """The run's folder, claimed by the chief; set to resume where torchrun restarted this very launch.

    Raises:
        CheckpointError: the folder holds something else, or this host doesn't see it.
        ConfigError: what one process does: answering or capturing first, timing steps at the end.
    """
    if config.data.cache_features:
        raise ConfigError(
            "--cache-features captures in one process before training: run draftsmith capture --out F once, then "
            "torchrun ... train --features F"
        )
    if config.answers.regenerate:
        raise ConfigError(
            "--regenerate answers in one process before training: run draftsmith regenerate once, with several "
            "--server URL where there is much to answer, then torchrun ... train --data with its file"
        )
    if config.measure.pace:
        raise ConfigError(
            "--pace times steps in one process: drop it, and run draftsmith evaluate RUN --max-drafts auto afterwards"
        )
    out = Path(config.out)
    if world.roles.is_chief:
        mine = identity(world)
        if not config.resume and _is_same_launch(out, mine, world.launch.restarts):
            resume = bool(checkpoint_folders(out / "checkpoints"))
        else:
            claim_folder(out, resume=config.resume)
            resume = config.resume
        write_whole(out / LAUNCH, json.dumps(mine))
        world.tell("claimed", "resume" if resume else "fresh")
    word = world.wait("claimed", "the first drafter to claim the run's folder").decode()
    if not (out / LAUNCH).exists():
        raise CheckpointError(
            f"{out} is not the folder that the first drafter sees: put --out on a disk all hosts share"
        )
    return out, replace(config, resume=word == "resume")


def identity(world: World) -> dict[str, Any]:
    """What marks one launch of torchrun: its id where one was given, and its agent's process on this host."""
    agent = psutil.Process(os.getppid())
    return {"run_id": world.launch.run_id, "host": os.uname().nodename, "agent": [agent.pid, agent.create_time()]}


def _is_same_launch(out: Path, mine: Mapping[str, Any], restarts: int) -> bool:
    """Whether the run in `out` was begun by the launch that now starts its ranks anew."""
    if not (out / LAUNCH).exists():
        return False
    there: dict[str, Any] = json.loads((out / LAUNCH).read_text(encoding="utf-8"))
    if mine["run_id"] != "none" and there["run_id"] == mine["run_id"]:
        return True
    return restarts > 0 and (there["host"], there["agent"]) == (mine["host"], mine["agent"])


def load_together(world: World, config: RunConfig, run: Path, console: Console) -> Inputs:
    """Target and data of this rank: the chief prepares the data first, the others take it from the run's folder.

    A rank that runs no target, not even to measure, has but the parts of it that a drafter shares and starts from.
    """
    roles = world.roles
    if not roles.is_chief:
        world.wait("prepared", "the first drafter to prepare the data")
    runs_target = roles.is_target or roles.feed == "joint"
    dtype = config.target.dtype
    # As the run's targets have it. Features on disk are as they are, and a target beside them stays on the host.
    if world.device.type == "cuda" and dtype == "auto" and roles.feed != "disk":
        dtype = "bfloat16"
    ranked = replace(config, target=replace(config.target, dtype=dtype))
    is_whole = runs_target or (roles.feed == "disk" and roles.is_chief and measures(config))
    where = world.device if runs_target else torch.device("cpu")
    inputs = load_inputs(ranked, run, console, placement_of(world), where, is_whole)
    if roles.is_chief:
        world.tell("prepared")
    return inputs


def feeder_of(world: World, stage: Stage, plan: Blueprint) -> Feeder | None:
    """What fills the ring of this rank's drafter: shards on disk, its own target, or (None) the target ranks."""
    roles = world.roles
    if roles.feed == "targets":
        return None

    def feed(ring: FeatureRing) -> Producer:
        # Of all batches this rank makes its drafter's only, so the other drafters' rings are never asked for.
        rings = [ring] * roles.num_drafters
        if stage.inputs.store is not None:
            folder, index = stage.inputs.store
            return ShardReadLoop(f"reader {roles.index}", folder, index, rings, plan.seed)
        data, order = stage.inputs.data, stage.order()
        assert data is not None
        assert order is not None
        (producer,) = build_targets(plan, [stage.target], data.train, order, rings, first=roles.index)
        return producer

    return feed


class ChiefCrew:
    """The first drafter's rank as the session runs it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rank: DrafterRank | None = None

    @property
    def signals(self) -> Requests:
        """The world, which asks every rank before it stops."""
        return self._world.signals

    def build(self, stage: Stage, after_step: AfterStep) -> Team:
        """The drafter of this process, with what fills its ring or stand-ins for it."""
        plan = blueprint_of(stage)
        self._rank = DrafterRank(self._world, plan, after_step, feeder_of(self._world, stage, plan))
        return self._rank.team

    def start(self, team: Team, checkpoint: Checkpoint | None) -> None:
        """Tell the others where all begin."""
        position = {"step": team.drafters[0].step, "checkpoint": str(checkpoint.path) if checkpoint else ""}
        self._world.tell("start", json.dumps(position))

    def run(self, team: Team) -> None:
        """Train to the end."""
        assert self._rank is not None
        self._rank.run()


def run_drafter_rank(world: World, stage: Stage) -> int:
    """Every drafter but the first: train along; the steps done."""
    plan = blueprint_of(stage)
    rank = DrafterRank(world, plan, _untold, feeder_of(world, stage, plan))
    (loop,) = rank.team.drafters
    start = json.loads(world.wait("start", "the first drafter to be built"))
    if start["checkpoint"]:
        continue_from(loop, load_checkpoint(Path(start["checkpoint"])))
    try:
        with Signals(world.signals, stage.console):
            rank.run()
    finally:
        rank.team.close()
    return loop.step


def _untold(_step: int, _is_last: bool) -> None:
    return


def run_target_rank(world: World, stage: Stage, measure: Callable[[str, Weights], Any] | None) -> None:
    """A target: produce until the drafters end; the first one measures on the way."""
    data, order = stage.inputs.data, stage.order()
    assert data is not None
    assert order is not None
    rank = TargetRank(world, blueprint_of(stage), stage.target, data.train, order)
    start = json.loads(world.wait("start", "the first drafter to be built"))
    desk = Desk(world, stage, measure) if measure is not None else None

    def look() -> None:
        if desk is not None and desk.is_asked():
            rank.producer.requests.append(desk.answer)

    with Signals(world.signals, stage.console):
        rank.run(int(start["step"]), look)


class Desk:
    """The first target's side of measuring: answers the chief's questions in their order."""

    def __init__(self, world: World, stage: Stage, measure: Callable[[str, Weights], Any]) -> None:
        self._world, self._measure = world, measure
        self._shapes = {name: tensor.shape for name, tensor in stage.start.drafter.state_dict().items()}
        self._seen = int(world.store.add("measured", 0))

    def is_asked(self) -> bool:
        """Whether there is a question that this hasn't been said of before."""
        if not self._world.has(f"measure/{self._seen}"):
            return False
        self._seen += 1
        return True

    def wait(self) -> None:
        """Answer the next question, whenever it comes."""
        self._world.wait(f"measure/{self._seen}", "the first drafter to ask for a measurement")
        self._seen += 1
        self.answer()

    def answer(self) -> None:
        """Take the weights, measure, tell the result."""
        world = self._world
        number = int(world.store.add("measured", 0))
        name = world.store.get(f"measure/{number}").decode()
        flat_N = torch.empty(sum(shape.numel() for shape in self._shapes.values()))
        receive_weights(world, flat_N)
        weights: dict[str, Tensor] = {}
        offset = 0
        for parameter, shape in self._shapes.items():
            weights[parameter] = flat_N[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
        result = self._measure(name, weights)
        world.tell(f"result/{number}", base64.b64encode(pickle.dumps(result)).decode())
        world.store.add("measured", 1)


class RemoteMeasures:
    """The chief's side of measuring."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = 0

    def ask(self, name: str, weights: Weights) -> Any:
        """What the first target measured with these weights (fp32, on the CPU, in the drafter's own order of names)."""
        world, number = self._world, self._asked
        self._asked += 1
        world.tell(f"measure/{number}", name)
        send_weights(world, torch.cat([tensor.float().reshape(-1) for tensor in weights.values()]))
        result = world.wait(f"result/{number}", "the first target to measure the drafter")
        return pickle.loads(base64.b64decode(result))
