"""`draftsmith chat`: a drafter tried in the terminal, with what it got right coloured block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from draftsmith.cli.parse import parse
from draftsmith.drafter.model import Drafter
from draftsmith.evaluate.decode import Decoded, DecodeLimits, Plain, decode, plain_decode
from draftsmith.evaluate.pace import measure_pace
from draftsmith.evaluate.prompts import Prompt, encode_prompt
from draftsmith.evaluate.source import open_drafter
from draftsmith.pipeline.placement import place
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.target.packed import packed_products

ABOUT = """Chat with a target through a drafter. Tokens that the drafter guessed are coloured, one colour a block,
in turns; the target's own stay plain. The foot shows tau and the speed-up over plain decoding. End with an
empty line."""
COLOURS = ("green", "cyan", "magenta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """Whom to talk to, and how."""

    drafter: Annotated[str, tyro.conf.Positional]
    """A run, a drafter's folder, a hub id, or smollm2-drafter (bundled)."""
    target: TargetConfig
    block_size: int = 0
    """Draft smaller blocks than trained (the known token included); 0 takes the trained size."""
    max_drafts: int | Literal["auto"] = "auto"
    """Verify only this many of each block's drafts; 0 verifies all. auto times steps of every size at the first
    question and takes what pays best on this device."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    say: str = ""
    """Ask this one question and end, instead of reading questions from the terminal."""
    plain: bool = True
    """Decode each answer plainly too, for the speed-up (takes as long again)."""
    template_kwargs: Mapping[str, bool | int | str] = field(default_factory=dict[str, "bool | int | str"])
    """Arguments of the chat template, such as `enable_thinking False`."""


class Painter:
    """Writes committed tokens as they come; text is decoded whole each time, since a token may be half a character."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._ids: list[int] = []
        self._shown = ""
        self._blocks = 0

    def __call__(self, token_ids: Sequence[int], num_drafted: int) -> None:
        colour = COLOURS[self._blocks % len(COLOURS)]
        self._blocks += num_drafted > 0
        for index, token in enumerate(token_ids):
            self._ids.append(token)
            text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
            if text.endswith("\ufffd"):
                continue  # the rest of this character comes with the next token
            fresh, self._shown = text[len(self._shown) :], text
            self._console.print(Text(fresh, style=colour if index < num_drafted else ""), end="", soft_wrap=True)


def chat(arguments: Sequence[str]) -> int:
    """Answer questions until an empty line."""
    command = parse(ChatCommand, "chat", arguments, ABOUT)
    console = Console()
    named = open_drafter(command.drafter, command.block_size)
    with console.status(f"loading {command.target.target}"):
        target = load_target(command.target, place(PipelineConfig()).targets[0])
    drafter = named.drafter.to(target.device)
    with packed_products(target.model, drafter):
        _talk(command, console, target, drafter)
    return 0


def _talk(command: ChatCommand, console: Console, target: Target, drafter: Drafter) -> None:
    stop_ids, max_drafts = target.facts.eos_token_ids, command.max_drafts
    limits = DecodeLimits(
        max_new_tokens=command.max_new_tokens, stop_ids=stop_ids, max_drafts=0 if max_drafts == "auto" else max_drafts
    )
    turns: list[dict[str, str]] = []
    while question := command.say or console.input("[bold]> [/bold]").strip():
        turns.append({"role": "user", "content": question})
        ids = encode_prompt(target, Prompt(source="chat", messages=tuple(turns)), command.template_kwargs)
        if max_drafts == "auto":
            with console.status("timing steps"):
                pace = measure_pace(target, drafter, [ids], command.max_new_tokens, stop_ids)
            console.print(Text(str(pace), style="dim"))
            max_drafts, limits = pace.num_drafts, replace(limits, max_drafts=pace.num_drafts)
        answer = decode(target, drafter, target.ends(), ids, limits, tell=Painter(console, target.tokenizer))
        console.print()
        plain = plain_decode(target, ids, limits) if command.plain else None
        console.print(Text(foot(answer, plain), style="dim"))
        turns.append({"role": "assistant", "content": answer_text(target, answer)})
        if command.say:
            break


def answer_text(target: Target, answer: Decoded) -> str:
    """What goes into the history: the answer without its end of turn."""
    return str(target.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True))


def foot(answer: Decoded, plain: Plain | None) -> str:
    """tau, tokens/s, and the speed-up where the answer was decoded plainly too."""
    rate = len(answer.token_ids) / max(1e-9, answer.prefill_seconds + answer.seconds)
    parts = [f"tau {answer.tau:.2f}", f"{rate:.1f} tokens/s"]
    if plain is not None:
        seconds = plain.prefill_seconds + plain.seconds
        parts.append(f"{seconds / max(1e-9, answer.prefill_seconds + answer.seconds):.2f}x plain decoding")
        parts.append("same text" if plain.token_ids == answer.token_ids else "other text than plain decoding")
    return "  ".join(parts)
