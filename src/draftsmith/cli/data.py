"""`draftsmith prepare`, `draftsmith inspect` and `draftsmith regenerate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from draftsmith.cli.parse import parse
from draftsmith.data.buckets import OrderConfig
from draftsmith.data.embedded import EmbeddedGenerate
from draftsmith.data.inspect import InspectConfig, inspect_data
from draftsmith.data.onpolicy import OnPolicyConfig
from draftsmith.data.prepare import PrepareConfig, tokenizer_digest
from draftsmith.data.prepare import prepare as prepare_data
from draftsmith.data.prepared import ACCOUNT_FILE, PreparedData, load_prepared, record_on_policy
from draftsmith.data.regenerate import RegenerateConfig, RegenerateReport
from draftsmith.data.regenerate import regenerate as regenerate_answers
from draftsmith.data.servers import ServerConfig, ServerGenerate
from draftsmith.errors import ConfigError, DataError
from draftsmith.pipeline.alarm import sound_alarm
from draftsmith.pipeline.documents import Documents
from draftsmith.pipeline.placement import place
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.target.model import TargetConfig, load_target, load_tokenizer, locate
from draftsmith.target.packed import packed_products
from draftsmith.target.weigh import weigh_target

PREPARE = """Turn conversations into token ids and loss masks: exactly what the target's own chat template gives, with
what the assistant itself would emit supervised. Every row is accounted for. Then some rows are scored with the target,
to tell whether their answers are its own.

CHATS are files or folders (JSONL, JSON, Parquet, gz, zst) or hub ids, each with an optional weight: chats.jsonl:0.5."""
INSPECT = """Look at data: rows with supervised tokens coloured, lengths, the bucket plan and what padding it costs.

DATA is a folder from draftsmith prepare, or conversations (a few thousand, prepared in memory)."""
REGENERATE = """Replace every answer by the target's own: from OpenAI-compatible servers (--server URL ...), or
generated in this process. A killed run goes on where it stopped."""
LARGEST_ON_CPU = 2_000_000_000
"""Parameters of a target that `prepare` scores rows with on a CPU by itself."""
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareCommand:
    """What to prepare, for which target."""

    chats: Annotated[tuple[str, ...], tyro.conf.Positional]
    """The conversations."""
    target: TargetConfig
    out: str
    """The folder to write."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    device: Device = "auto"
    """Where rows are scored: auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if not self.chats:
            raise ConfigError("nothing to prepare: draftsmith prepare CHATS --target T --out DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectCommand:
    """What to look at."""

    data: Annotated[str, tyro.conf.Positional]
    """The data."""
    target: TargetConfig
    show: InspectConfig = field(default_factory=InspectConfig)
    order: OrderConfig = field(default_factory=OrderConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateCommand:
    """Whose answers to replace, and by whom."""

    chats: Annotated[tuple[str, ...], tyro.conf.Positional]
    """The conversations."""
    target: TargetConfig
    out: str
    """The JSONL file to write."""
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    servers: ServerConfig = field(default_factory=ServerConfig)
    generate_batch: int = 8
    """Without --server: prompts generated together."""
    device: Device = "auto"
    """Without --server, where to run: auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if not self.chats:
            raise ConfigError("nothing to regenerate: draftsmith regenerate CHATS --target T --out FILE")


def prepare(arguments: Sequence[str]) -> int:
    """Prepare, then say whose answers these are."""
    command = parse(PrepareCommand, "prepare", arguments, PREPARE)
    console = Console()
    tokenizer = _tokenizer(command.target)
    data = prepare_data(command.chats, tokenizer, command.out, command.prepare, console)
    where = place(PipelineConfig(device=command.device)).targets[0]
    if _can_score(command, where, console):
        with console.status(f"loading target {escape(command.target.target)}"):
            target = load_target(command.target, where)
        found = sound_alarm(target, Documents(data, range(len(data))), command.on_policy, console)
        if found is not None:
            record_on_policy(Path(command.out), {"target": target.facts.name, **found.to_dict()})
    console.print(
        f"train on it: draftsmith train --target {command.target.target} --data {command.out}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _can_score(command: PrepareCommand, where: torch.device, console: Console) -> bool:
    rows = command.on_policy.off_policy_rows
    if rows != "auto" or where.type != "cpu":
        return rows != 0
    total = weigh_target(command.target).total
    if total > LARGEST_ON_CPU:
        console.print(
            f"not checked whether these are the target's own answers: {total / 1e9:.1f}B parameters are slow on a CPU; "
            "--off-policy-rows 24 does it anyway, and draftsmith train on a GPU does it first",
            highlight=False,
        )
    return total <= LARGEST_ON_CPU


def inspect(arguments: Sequence[str]) -> int:
    """Print it, or write the page."""
    command = parse(InspectCommand, "inspect", arguments, INSPECT)
    tokenizer = _tokenizer(command.target)
    inspect_data(_open(command, tokenizer), tokenizer, command.show, command.order, Console())
    return 0


def _open(command: InspectCommand, tokenizer: Any) -> PreparedData:
    folder = Path(command.data).expanduser()
    if not (folder / ACCOUNT_FILE).is_file():
        return prepare_data(command.data, tokenizer, None, PrepareConfig())
    data = load_prepared(folder)
    if data.facts["tokenizer"] != tokenizer_digest(tokenizer):
        raise DataError(
            f"{folder} was prepared with another tokenizer than {command.target.target} has: give the target that it "
            "was prepared for"
        )
    return data


def regenerate(arguments: Sequence[str]) -> int:
    """Write the answers and say what became of every row."""
    command = parse(RegenerateCommand, "regenerate", arguments, REGENERATE)
    console = Console()
    settings = command.regenerate
    if command.servers.server:
        with ServerGenerate(command.servers, settings.sampling) as generate:
            report = regenerate_answers(command.chats, command.out, generate, settings, console)
    else:
        where = place(PipelineConfig(device=command.device)).targets[0]
        with console.status(f"loading target {escape(command.target.target)}"):
            target = load_target(command.target, where)
        embedded = EmbeddedGenerate(
            target.model,
            target.tokenizer,
            settings.sampling,
            end_token_ids=target.facts.eos_token_ids,
            batch_size=command.generate_batch,
        )
        with packed_products(target.model):
            report = regenerate_answers(command.chats, command.out, embedded, settings, console)
    _print_report(report, command, console)
    return 0


def _print_report(report: RegenerateReport, command: RegenerateCommand, console: Console) -> None:
    console.print(f"{command.out}: {report.rows_out:,} of {report.rows_in:,} rows", markup=False, highlight=False)
    if report.num_cut:
        kept = "marked, their end isn't learnt" if command.regenerate.cut_answers == "mark" else "left out"
        console.print(f"{report.num_cut:,} answers reached the longest length ({kept})", highlight=False)
    for reason, count in report.skipped.items():
        console.print(f"left out: {count:,} x {reason}", markup=False, highlight=False)


def _tokenizer(config: TargetConfig) -> Any:
    return load_tokenizer(config, locate(config), required=True)
