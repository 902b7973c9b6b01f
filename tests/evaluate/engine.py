"""A small engine at the seam: speaks vLLM's or SGLang's HTTP on a real socket, with a tiny target and drafter."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import torch

from draftsmith.drafter.model import Drafter
from draftsmith.evaluate.decode import Decoded
from draftsmith.evaluate.serving import decode_as_served
from draftsmith.target.model import Target


@dataclass(kw_only=True)
class Engine:
    """What the server serves, and how it misbehaves."""

    target: Target
    drafter: Drafter
    kind: Literal["vllm", "sglang", "plain"] = "vllm"
    lag: int = 0
    """Reads of /metrics that come before an answer is counted."""
    stray_tokens: int = 0
    """Tokens generated for someone else during each answer."""
    width: int = 0
    """Drafted tokens a step as told; 0 tells the truth."""
    forgets: int = 0
    """Accepted drafts of the first place that each answer leaves uncounted."""
    template_suffix: tuple[int, ...] = ()
    limit: int = 10_000
    """Longest prompt taken."""
    gives_ids: bool = True
    counters: dict[str, int] = field(default_factory=dict)
    behind: list[dict[str, int]] = field(default_factory=list)

    def run(self, prompt: list[int], max_new_tokens: int) -> Decoded:
        torch.set_num_threads(1)
        decoded = decode_as_served(self.target, self.drafter, prompt, max_new_tokens)
        late = dict(self.counters)
        places = self.drafter.config.block_size - 1
        added = {
            "spec_decode_num_drafts": len(decoded.steps),
            "spec_decode_num_draft_tokens": len(decoded.steps) * (self.width or places),
            "generation_tokens": len(decoded.token_ids) + self.stray_tokens,
        }
        for place in range(places):
            added[f"place {place}"] = sum(step.accepted > place for step in decoded.steps)
        added["place 0"] -= self.forgets
        for name, value in added.items():
            late[name] = late.get(name, 0) + value
        self.behind = [dict(self.counters) for _ in range(self.lag)]
        self.counters = late
        return decoded

    def metrics(self) -> str:
        if self.kind == "plain":
            return "# nothing about drafting\nvllm:generation_tokens_total 3.0\n"
        now = self.behind.pop() if self.behind else self.counters
        # As prometheus_client writes them, on two engines the second of which has done nothing.
        lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
        for engine, counts in (("0", now), ("1", {})):
            for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "generation_tokens"):
                lines.append(f'vllm:{name}_total{{engine="{engine}",model_name="tiny"}} {float(counts.get(name, 0))}')
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{place}"}} '
                f"{float(counts.get(f'place {place}', 0))}"
                for place in range(self.drafter.config.block_size - 1)
            ]
        lines.append('vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09')
        return "\n".join(lines)

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/metrics":
            return (404, "") if self.kind == "sglang" else (200, self.metrics())
        if path == "/get_model_info":
            return (200, "{}") if self.kind == "sglang" else (404, "")
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny"}]})
        if path == "/tokenize":
            if self.kind == "sglang":
                return 404, ""
            kwargs = body["chat_template_kwargs"]
            rendered = self.target.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False, **kwargs
            )
            return 200, json.dumps({"tokens": [*rendered, *self.template_suffix]})
        if path == "/generate":
            return self.generate(body)
        return self.complete(body)

    def complete(self, body: dict[str, Any]) -> tuple[int, str]:
        if len(body["prompt"]) > self.limit:
            return 400, '{"error": "context too long"}'
        assert body["temperature"] == 0.0
        decoded = self.run(body["prompt"], body["max_tokens"])
        kept = [token for token in decoded.token_ids if token not in self.target.facts.eos_token_ids]
        choice: dict[str, Any] = {"text": self.target.tokenizer.decode(kept, skip_special_tokens=True)}
        if self.gives_ids:
            choice["token_ids"] = list(decoded.token_ids)
        usage = {"completion_tokens": len(decoded.token_ids)}
        return 200, json.dumps({"choices": [choice], "usage": usage})

    def generate(self, body: dict[str, Any]) -> tuple[int, str]:
        decoded = self.run(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        histogram = [0] * self.drafter.config.block_size
        for step in decoded.steps:
            histogram[step.accepted] += 1
        info = {"spec_verify_ct": len(decoded.steps), "spec_accept_histogram": histogram}
        if self.width < 0:
            del info["spec_accept_histogram"]
        return 200, json.dumps({"output_ids": list(decoded.token_ids), "text": "", "meta_info": info})


@contextmanager
def running(engine: Engine) -> Generator[str]:
    """The engine's URL while the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: dict[str, Any]) -> None:
            status, text = engine.reply(self.path, body)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
