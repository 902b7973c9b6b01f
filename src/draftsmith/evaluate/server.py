"""Asks a running vLLM or SGLang what it drafted: one prompt at a time, its counters read before and after.

vLLM tells in its Prometheus `/metrics`, for all requests together, so the server must be idle otherwise (checked by its
count of generated tokens). SGLang tells per request, in the reply of its own `/generate`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast

import httpx

from draftsmith.errors import ConfigError

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
ACCEPTED_BY_PLACE, GENERATED = "vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:generation_tokens"
SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{([^}]*)\})? (\S+)$")
POSITION = re.compile(r'position="(\d+)"')
METRICS_WAIT = 10.0
"""Seconds that a server may take to count what it has answered."""
START = 'vllm serve TARGET --speculative-config \'{"method": "dflash", "model": DRAFTER, ...}\''


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer of a server and how it came about."""

    token_ids: tuple[int, ...] | None
    """None from a server that gives text only."""
    text: str
    num_drafts: int
    """Verify steps."""
    num_drafted: int | None
    """Tokens drafted in all of them; None where the server doesn't say."""
    accepted_by_place: tuple[int, ...]
    """Steps whose first k drafts were all accepted, k = 1, 2, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """vLLM's counters since it started."""

    num_drafts: int
    num_drafted: int
    num_generated: int
    accepted_by_place: tuple[int, ...]


def read_counters(text: str) -> Counters | None:
    """Of a `/metrics` page, summed over its engines; None where nothing about drafting is on it."""
    sums: dict[str, int] = {}
    places: dict[int, int] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", int(float(match[3]))
        position = POSITION.search(labels)
        if name == ACCEPTED_BY_PLACE and position is not None:
            places[int(position[1])] = places.get(int(position[1]), 0) + value
        else:
            sums[name] = sums.get(name, 0) + value
    if DRAFTS not in sums:
        return None
    return Counters(
        num_drafts=sums[DRAFTS],
        num_drafted=sums.get(DRAFTED, 0),
        num_generated=sums.get(GENERATED, 0),
        accepted_by_place=tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1)),
    )


class Server:
    """A running server with speculative decoding. A context manager: it owns a connection."""

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        """Find out what runs there.

        Args:
            url: such as http://localhost:8000, with or without /v1.
            timeout: seconds that one answer may take.

        Raises:
            ConfigError: nothing answers, or it doesn't draft.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout, connect=10.0))
        try:
            self.model = self._first_model()
            self.kind: Literal["vllm", "sglang"] = self._find_kind()
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def _first_model(self) -> str:
        reply = self._send("GET", "/v1/models", None)
        models = cast(list[dict[str, Any]], _object(reply).get("data") or [])
        if not models:
            raise ConfigError(f"{self.url} lists no model (status {reply.status_code}): give --server the URL of one")
        return str(models[0]["id"])

    def _find_kind(self) -> Literal["vllm", "sglang"]:
        if self._counters() is not None:
            return "vllm"
        if self._send("GET", "/get_model_info", None).status_code < 400:
            return "sglang"
        raise ConfigError(
            f"{self.url} serves {self.model} without drafting, or doesn't show it in /metrics: start it with {START}"
        )

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ConfigError(
                f"no answer from {self.url}{path} ({type(error).__name__}): start the server, or correct --server"
            ) from error

    def _counters(self) -> Counters | None:
        reply = self._send("GET", "/metrics", None)
        return read_counters(reply.text) if reply.status_code < 400 else None

    def rendered(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int] | None:
        """The token ids that the server's own chat template makes of `messages`; None where it doesn't say."""
        body = {"model": self.model, "messages": [dict(message) for message in messages], "add_generation_prompt": True}
        reply = self._send("POST", "/tokenize", body | {"chat_template_kwargs": dict(template_kwargs)})
        tokens = _object(reply).get("tokens") if reply.status_code < 400 else None
        return None if tokens is None else [int(token) for token in cast(list[Any], tokens)]

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Served:
        """The greedy answer to one prompt.

        Raises:
            ConfigError: the server refuses the prompt, or answers someone else's meanwhile.
        """
        if self.kind == "sglang":
            return self._answer_sglang(prompt_ids, max_new_tokens)
        before = self._counters()
        body = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        reply = self._accepted(self._send("POST", "/v1/completions", body))
        choice = cast(dict[str, Any], reply["choices"][0])
        after = self._settled(before, int(reply["usage"]["completion_tokens"]))
        assert before is not None
        places = len(after.accepted_by_place)
        earlier = (*before.accepted_by_place, *(0,) * places)[:places]
        tokens = choice.get("token_ids")
        return Served(
            token_ids=tuple(int(token) for token in tokens) if tokens is not None else None,
            text=str(choice.get("text") or ""),
            num_drafts=after.num_drafts - before.num_drafts,
            num_drafted=after.num_drafted - before.num_drafted,
            accepted_by_place=tuple(late - early for late, early in zip(after.accepted_by_place, earlier, strict=True)),
        )

    def _settled(self, before: Counters | None, generated: int) -> Counters:
        """The counters once they hold the answer: they may lag behind the reply."""
        assert before is not None
        deadline = time.monotonic() + METRICS_WAIT
        while True:
            after = self._counters()
            found = -1 if after is None else after.num_generated - before.num_generated
            if after is not None and found == generated:
                return after
            if found > generated:
                raise ConfigError(
                    f"{self.url} answered other requests meanwhile ({found} tokens, {generated} of them ours): its "
                    "counters mix them, so try again when it is idle"
                )
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.url}/metrics didn't count an answer in {METRICS_WAIT:.0f} s: try again")
            time.sleep(0.02)

    def _answer_sglang(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Served:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling}
        reply = self._accepted(self._send("POST", "/generate", body))
        info = cast(dict[str, Any], reply["meta_info"])
        histogram = cast(list[int] | None, info.get("spec_accept_histogram"))
        if "spec_verify_ct" not in info or histogram is None:
            raise ConfigError(
                f"{self.url} doesn't say what it drafted (no spec_accept_histogram): start it with "
                "--speculative-algorithm DFLASH, on a version that tells"
            )
        tokens = reply.get("output_ids")
        return Served(
            token_ids=tuple(int(token) for token in tokens) if tokens is not None else None,
            text=str(reply.get("text") or ""),
            num_drafts=int(info["spec_verify_ct"]),
            num_drafted=None,
            # Its n-th entry counts steps that accepted n drafts exactly; at least k is a sum from k on.
            accepted_by_place=tuple(sum(histogram[place:]) for place in range(1, len(histogram))),
        )

    def _accepted(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code >= 400:
            raise ConfigError(
                f"{self.url} refuses a prompt (status {reply.status_code}: {reply.text[:200]}): give --prompts that "
                "fit its context, or a smaller --max-new-tokens"
            )
        return _object(reply)


def _object(reply: httpx.Response) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    try:
        values: Any = reply.json()
    except ValueError:
        return {}
    return cast(dict[str, Any], values) if isinstance(values, dict) else {}
