"""Runs -> one self-contained HTML page, with its pictures as PNGs beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from draftsmith import __version__
from draftsmith.report.charts import all_charts
from draftsmith.report.gpus import busy_gpus
from draftsmith.report.paper import Chart
from draftsmith.report.runs import Run

COLUMNS = (
    "drafter",
    "prompts",
    "tau",
    "tau per answer",
    "speed-up",
    "tokens/s",
    "plain tokens/s",
    "answers",
    "same as plain",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number to see first."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Names and values."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """One run as the page shows it."""

    name: str
    verdict: str
    numbers: Sequence[Figure]
    tables: Sequence[Table]
    command: str


def write_report(runs: Sequence[Run], out: Path, commands: Mapping[str, str]) -> list[Path]:
    """Write the page to `out` and its pictures into `OUT's name_png/` beside it.

    Args:
        runs: as read.
        out: the HTML file.
        commands: by run name, the command that makes such a run; may lack some.

    Returns:
        Every file written, the page first.
    """
    charts = all_charts(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(runs, charts, commands), encoding="utf-8")
    pictures = out.parent / f"{out.stem}_png"
    pictures.mkdir(exist_ok=True)
    return [out, *(chart.save_png(pictures) for chart in charts)]


def render(runs: Sequence[Run], charts: Sequence[Chart], commands: Mapping[str, str]) -> str:
    """The page's text."""
    template = (files("draftsmith") / "assets" / "report" / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = [row for run in runs for row in evaluation_rows(run, many=len(runs) > 1)]
    return environment.from_string(template).render(
        title=", ".join(run.name for run in runs),
        subtitle=f"draftsmith {__version__}, report of {time.strftime('%Y-%m-%d %H:%M')}",
        runs=[run_part(run, commands.get(run.name, "")) for run in runs],
        charts=[{"key": chart.key, "title": chart.title, "note": chart.note, "svg": chart.svg()} for chart in charts],
        evaluation={"columns": COLUMNS, "rows": rows} if rows else None,
    )


def evaluation_rows(run: Run, many: bool) -> list[tuple[str, ...]]:
    """Before and after, over everything and by group where there are several."""
    rows: list[tuple[str, ...]] = []
    for when in ("before", "after"):
        result: Mapping[str, Any] | None = run.evaluation.get(when)
        if result is None:
            continue
        name = f"{run.name}, {when}" if many else when
        groups: Mapping[str, Any] = result.get("groups") or {}
        rows.append(_row(name, "all", result["summary"]))
        if len(groups) > 1:
            rows.extend(_row(name, group, summary) for group, summary in groups.items())
    return rows


def _row(name: str, group: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    tau, plain, speedup = summary["tau"], summary["plain_tokens_per_second"], summary["speedup"]
    return (
        name,
        group,
        f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]",
        f"{summary['tau_per_response']:.2f}",
        "-" if speedup is None else f"{speedup:.2f}x",
        f"{summary['tokens_per_second']:,.1f}",
        "-" if plain is None else f"{plain:,.1f}",
        f"{summary['num_prompts']}",
        str(summary["identical"]),
    )


def run_part(run: Run, command: str) -> RunPart:
    """What the page says of one run besides its curves."""
    return RunPart(name=run.name, verdict=verdict(run), numbers=_numbers(run), tables=_tables(run), command=command)


def verdict(run: Run) -> str:
    """Whether training made the drafter better, whether it pays here, and whether the answers were foreign, in a
    sentence each; "" where not measured."""
    foreign = f"Of its data: {run.on_policy['verdict']}" if run.on_policy.get("is_foreign") else ""
    return " ".join(sentence for sentence in (_better(run), _pays(run), foreign) if sentence)


def _pays(run: Run) -> str:
    speedup = run.evaluation["after"]["summary"]["speedup"] if "after" in run.evaluation else None
    if speedup is None or speedup >= 1:
        return ""
    return (
        f"On this machine drafting is slower than plain decoding ({speedup:.2f}x): a block costs more here than the "
        "forwards it saves. Measure where you serve, or draft fewer tokens."
    )


def _better(run: Run) -> str:
    if not {"before", "after"} <= set(run.evaluation):
        return ""
    before, after = (run.evaluation[when]["summary"]["tau"] for when in ("before", "after"))
    change = f"tau {before['value']:.2f} before, {after['value']:.2f} after"
    if after["low"] > before["high"]:
        return f"Training made the drafter better: {change}, and the intervals don't meet."
    if after["high"] < before["low"]:
        return f"Training made the drafter worse: {change}. Look at the data and the learning rate."
    return f"No difference beyond the intervals: {change}. Measure on more prompts, or train longer."


def _numbers(run: Run) -> list[Figure]:
    last = run.train[-1]
    minutes = run.minutes(run.train)[-1]
    found = [
        Figure(name="steps", value=f"{last['step']:,}", note=f"{minutes:,.1f} minutes"),
        Figure(name="labels", value=short(run.labels()[-1]), note=f"{short(last['labels_per_s'])} a second"),
        Figure(name="cross entropy", value=_shown(last["ce"]), note=f"from {_shown(run.train[0]['ce'])}"),
        Figure(name="estimated tau", value=_shown(last["uniform_tau"]), note="uniform anchors, overstates"),
    ]
    if "after" in run.evaluation:
        summary = run.evaluation["after"]["summary"]
        tau, speedup = summary["tau"], summary["speedup"]
        note = f"[{tau['low']:.2f}, {tau['high']:.2f}] over {summary['num_prompts']} prompts"
        found.insert(0, Figure(name="tau", value=f"{tau['value']:.2f}", note=note))
        if speedup is not None:
            found.insert(1, Figure(name="speed-up", value=f"{speedup:.2f}x", note="one request at a time"))
    busy = busy_gpus(run)
    if busy:
        mean = sum(gpu.share for gpu in busy) / len(busy)
        least = min(busy, key=lambda gpu: gpu.share)
        note = "utilisation" if len(busy) == 1 else f"utilisation; least {least.device}, {least.share:.0%}"
        found.append(Figure(name="GPUs busy", value=f"{mean:.0%}", note=note))
    if last["skipped"]:
        found.append(Figure(name="skipped steps", value=f"{last['skipped']}", note="non-finite gradients"))
    return found


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def short(value: float) -> str:
    """1,234,567 as 1.2M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _tables(run: Run) -> list[Table]:
    tables: list[Table] = []
    if run.resolved:
        tables.append(Table(title="What it used", rows=_resolved_rows(run.resolved)))
    data = [*(_account_rows(run.account) if run.account else ()), *_on_policy_rows(run.on_policy)]
    if data:
        tables.append(Table(title="Data", rows=data))
    environment = [(name, str(version)) for name, version in run.versions.items()]
    if "gpus" in run.resolved:
        environment.insert(0, ("workers", str(run.resolved["gpus"])))
    environment.append(("folder", str(run.folder)))
    tables.append(Table(title="Environment", rows=environment))
    return tables


def _resolved_rows(resolved: Mapping[str, Any]) -> list[tuple[str, str]]:
    architecture, objective = resolved.get("architecture", {}), resolved.get("objective", {})
    batching = resolved.get("batching", {})
    order = batching.get("order", {})
    rows = [
        ("target", resolved.get("target", {}).get("name")),
        ("drafter layers", len(architecture.get("layer_types", ())) or None),
        ("block size", architecture.get("block_size")),
        ("taps", architecture.get("taps")),
        ("mask token", architecture.get("mask_token_id")),
        ("objective", " ".join(str(objective[key]) for key in ("loss", "weights") if key in objective) or None),
        ("gamma", objective.get("gamma")),
        ("token budget", order.get("token_budget")),
        ("anchors x draws", f"{batching['num_anchors']} x {batching['draws_per_batch']}" if batching else None),
        ("steps planned", batching.get("total_steps")),
        ("buckets", batching.get("buckets")),
        ("seed", order.get("seed")),
    ]
    return [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in rows if value is not None]


def _on_policy_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not found:
        return []
    scored = f"{found['num_rows']:,} rows, {found['num_tokens']:,} tokens; {found['share_foreign']:.0%} look foreign"
    return [("whose answers", str(found["verdict"])), ("scored", scored)]


def _account_rows(account: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every row in, kept, or skipped and why: the numbers add up."""
    rows = [("rows in", f"{account['rows_in']:,}"), ("kept", f"{account['rows_kept']:,}")]
    rows += [(f"skipped: {reason}", f"{count:,}") for reason, count in account["skipped"].items()]
    rows += [(f"turns not learnt: {reason}", f"{count:,}") for reason, count in account["turns_left_out"].items()]
    share = account["supervised_tokens"] / max(1, account["tokens"])
    rows.append(("documents", f"{account['documents']:,} ({account['documents_cut']:,} cut)"))
    rows.append(("tokens", f"{account['tokens']:,} ({share:.0%} supervised)"))
    rows += [("template arguments", f"{text}: {count:,}") for text, count in account["template_arguments"].items()]
    return rows
