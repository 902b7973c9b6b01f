"""One rank of a tiny distributed run, started by torchrun: `rank_main.py OUT SIZES [what to break]`.

The chief leaves losses and weights in OUT; every rank leaves a line on how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from draftsmith.errors import DraftsmithError
from draftsmith.pipeline.assemble import Blueprint
from draftsmith.pipeline.launch import Hosts, Shares
from draftsmith.pipeline.ranks import DrafterRank, TargetRank, placement_of
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.world import World, join_world
from tests.families import fresh_target
from tests.pipeline.tiny import FAMILY, LossLog, Sizes, blueprint, documents, order


def run_rank(world: World, sizes: Sizes, out: Path, fault: str) -> None:
    """Build and run this rank's part; `fault` is ROLE:INDEX:HOW."""
    target = fresh_target(FAMILY)
    plan = blueprint(sizes, target, world.stop)
    object.__setattr__(plan, "placement", placement_of(world))
    strike = striker(world, fault, out)
    signal.signal(signal.SIGTERM, lambda *_: world.signals.request())
    if world.roles.is_target:
        target.layers[0].register_forward_pre_hook(lambda *_: strike())
        TargetRank(world, plan, target, documents(), order()).run(0, lambda: None)
        return
    run_drafter(world, plan, out, strike)


def run_drafter(world: World, plan: Blueprint, out: Path, strike: object) -> None:
    log = LossLog()
    assert callable(strike)

    def after_step(step: int, is_last: bool) -> None:
        log(step, is_last)
        strike()

    rank = DrafterRank(world, plan, after_step)
    log.team = rank.team
    rank.run()
    if world.roles.is_chief:
        loop = rank.team.drafters[0]
        master = loop.stepper.state.parameters.master_N
        torch.save({"losses": log.losses, "master": master, "step": loop.step}, out / "chief.pt")
        shares = {remote.clock.name: remote.clock.tokens for remote in rank.team.producers}
        (out / "tokens.json").write_text(json.dumps(shares))


def striker(world: World, fault: str, out: Path) -> object:
    """Breaks this rank on its 5th call, if it is the one."""
    role, _, rest = fault.partition(":")
    index, _, how = rest.partition(":")
    name = world.roles.name(world.roles.rank)
    calls = 0

    def strike() -> None:
        nonlocal calls
        calls += 1
        if calls != 5 or name != f"{role} {index}":
            return
        (out / "struck").write_text(name)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("struck by a bomb")
        if how == "term":
            os.kill(os.getpid(), signal.SIGTERM)

    return strike


def unasked(_hosts: Hosts) -> Shares:
    raise AssertionError("the roles are given")


def main() -> int:
    out, sizes, fault = Path(sys.argv[1]), Sizes(**json.loads(sys.argv[2])), sys.argv[3]
    torch.set_num_threads(1)
    config = PipelineConfig(device="cpu", targets=sizes.targets, drafters=sizes.drafters, stall_seconds=sizes.stall)
    world = join_world(config, unasked)
    assert world is not None
    ended = "finished"
    try:
        with world:
            run_rank(world, sizes, out, fault)
    except DraftsmithError as error:
        ended = f"{type(error).__name__}: {error}"
    (out / f"rank-{world.roles.rank}.txt").write_text(ended)
    return 0 if ended == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
