from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt, RegenerateConfig, SamplingConfig, regenerate
from draftsmith.data.servers import ServerConfig, ServerGenerate, parse_answer
from draftsmith.errors import DataError


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"q{index}.0"}], "completion": "foreign", "system": None}
        for index in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class _Server:
    """A small OpenAI-compatible server on a real socket that can be killed and started again."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.busy = 0
        self.die_after = 10**9
        self._lock = threading.Lock()

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            content = body["messages"][-1]["content"]
            self.asked[content] += 1
            self.bodies.append(body)
            if self.busy:
                self.busy -= 1
                return 503, {}
            if self.asked.total() > self.die_after:
                return 500, {}
        if content == "q3.0":
            return 400, {"error": "context too long"}
        message = {"role": "assistant", "content": f"own {content}", "reasoning_content": "why"}
        choice = {"message": message, "finish_reason": "stop", "token_ids": [7, 8]}
        return 200, {"choices": [choice], "prompt_token_ids": [1, 2]}

    @contextmanager
    def running(self) -> Iterator[str]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                self._send(*server.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def _send(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/v1"
        finally:
            http.shutdown()
            thread.join()
            http.server_close()


def test_a_server_killed_half_way_leaves_a_complete_output_without_doubles(chats: Path, tmp_path: Path) -> None:
    server = _Server()
    config = RegenerateConfig(batch_rows=4)
    out = tmp_path / "own.jsonl"
    with server.running() as url:
        server.die_after = 12
        settings = ServerConfig(server=(url,), concurrency=2, retries=1)
        with (
            ServerGenerate(settings, config.sampling, sleep=lambda seconds: None) as generate,
            pytest.raises(DataError, match=r"after 2 tries \(status 500 .*finished rows are kept"),
        ):
            regenerate(chats, out, generate, config)
    server.die_after = 10**9
    with server.running() as url, ServerGenerate(ServerConfig(server=(url,)), config.sampling) as generate:
        report = regenerate(chats, out, generate, config)
    rows = rows_of(out)
    assert report.skipped["the server refused the prompt"] == 1
    assert [row["messages"][0]["content"] for row in rows] == [f"q{index}.0" for index in range(20) if index != 3]
    assert all(row["messages"][-1]["content"].startswith("own ") for row in rows)
    assert rows[0]["prompt_token_ids"] == [1, 2]
    assert rows[0]["completion_token_ids"] == [7, 8]
    assert rows[0]["messages"][1]["reasoning_content"] == "why"


def test_busy_servers_are_asked_again_with_growing_waits_and_dead_ones_passed(chats: Path, tmp_path: Path) -> None:
    server, waits = _Server(), list[float]()
    messages = [{"role": "user", "content": "q"}]
    prompt = Prompt(messages=messages, tools=[{"a": 1}], template_kwargs={"k": 1}, seed=7)
    server.busy = 3
    with server.running() as url:
        config = ServerConfig(server=(url, "http://127.0.0.1:9/v1"), concurrency=1, model="named", longest_wait=3.0)
        with ServerGenerate(config, SamplingConfig(seed=5, max_new_tokens=9), sleep=waits.append) as generate:
            answers = generate([prompt])
    assert isinstance(answers[0], Answer)
    assert waits == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    body = server.bodies[-1]
    assert body["model"] == "named"
    assert (body["seed"], body["max_tokens"], body["chat_template_kwargs"], body["tools"]) == (
        7,
        9,
        {"k": 1},
        [{"a": 1}],
    )


def test_replies_that_are_no_completion_are_skipped() -> None:
    for content in ("<html>", "[]", '{"choices": []}', '{"choices": [{}]}'):
        assert isinstance(parse_answer(httpx.Response(200, text=content)), Skip)


def test_a_server_without_models_asks_for_a_name() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    with (
        ServerGenerate(ServerConfig(server=("http://one/v1",)), SamplingConfig(), transport=transport) as generate,
        pytest.raises(DataError, match="--model"),
    ):
        generate([])
