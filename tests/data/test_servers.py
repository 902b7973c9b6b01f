from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers.utils.import_utils import is_serve_available

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt, RegenerateConfig, SamplingConfig, answer_all, regenerate
from draftsmith.data.servers import ServerConfig, ServerGenerate, parse_answer
from draftsmith.errors import DataError
from tests.families import save_tiny


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"q{index}.0"}], "completion": "foreign", "system": None}
        for index in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


ROLES = ("user", "assistant")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class _Server:
    """A small OpenAI-compatible server on a real socket that can be killed and started again."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.busy = 0
        self.fails = ""
        """The question that is answered by status 500."""
        self.die_after = 10**9
        self.seconds: Callable[[str], float] = lambda content: 0.0
        """How long an answer takes."""
        self.spans: list[tuple[float, float]] = []
        """When each request came and when it was answered."""
        self._lock = threading.Lock()

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            content = body["messages"][-1]["content"]
            self.asked[content] += 1
            self.bodies.append(body)
            if self.busy:
                self.busy -= 1
                return 503, {}
            if self.asked.total() > self.die_after or content == self.fails:
                return 500, {}
        came = time.monotonic()
        time.sleep(self.seconds(content))
        with self._lock:
            self.spans.append((came, time.monotonic()))
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
    config = RegenerateConfig()
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


def _share_busy(spans: list[tuple[float, float]], num_slots: int) -> float:
    """Of the slots' time from the first request until the last one came (after that there is nothing to fill them)."""
    first, last = min(came for came, _ in spans), max(came for came, _ in spans)
    return sum(min(ended, last) - came for came, ended in spans) / (num_slots * (last - first))


def test_the_servers_are_kept_busy_whatever_the_answers_lengths(tmp_path: Path) -> None:
    """One answer in six takes ten times as long; conversations have one turn or two."""
    server, slots = _Server(), 6
    server.seconds = lambda content: 1.0 if content.endswith("7") else 0.1
    rows = [
        {"messages": [{"role": role, "content": f"{index} {turn}{index % 6 + 2}"} for turn in turns for role in ROLES]}
        for index, turns in enumerate([(0,), (0, 1)] * 40)
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RegenerateConfig()
    with server.running() as url:
        settings = ServerConfig(server=(url,), concurrency=slots)
        with ServerGenerate(settings, config.sampling) as generate:
            report = regenerate(chats, tmp_path / "own.jsonl", generate, config)
    assert report.rows_out == 80
    assert len(server.spans) == len(server.asked) == 120
    busy = _share_busy(server.spans, slots)
    assert busy >= 0.85, f"slots were busy {busy:.0%} of the time"


def test_answers_under_way_when_a_request_fails_are_kept(chats: Path, tmp_path: Path) -> None:
    """q1.0 is refused by every try at once; the slow ones beside it are answered after that."""
    server, out = _Server(), tmp_path / "own.jsonl"
    server.fails = "q1.0"
    server.seconds = lambda content: 0.4
    config = RegenerateConfig()
    with server.running() as url:
        settings = ServerConfig(server=(url,), concurrency=4, retries=1)
        with (
            ServerGenerate(settings, config.sampling, sleep=lambda seconds: None) as generate,
            pytest.raises(DataError, match="after 2 tries"),
        ):
            regenerate(chats, out, generate, config)
    kept = [json.loads(line)["index"] for line in (tmp_path / "own.jsonl.partial").read_text().splitlines()[1:]]
    assert 0 in kept
    assert 2 in kept
    answered = {content for content in server.asked if content != server.fails}
    assert len(kept) == len(set(kept)) == len(answered), "whatever was asked was answered and kept"
    assert len(answered) < 8, "and no more was begun"


def test_busy_servers_are_asked_again_with_growing_waits_and_dead_ones_passed(chats: Path, tmp_path: Path) -> None:
    server, waits = _Server(), list[float]()
    messages = [{"role": "user", "content": "q"}]
    prompt = Prompt(messages=messages, tools=[{"a": 1}], template_kwargs={"k": 1}, seed=7)
    server.busy = 3
    with server.running() as url:
        config = ServerConfig(server=(url, "http://127.0.0.1:9/v1"), concurrency=1, model="named", longest_wait=3.0)
        with ServerGenerate(config, SamplingConfig(seed=5, max_new_tokens=9), sleep=waits.append) as generate:
            answers = answer_all(generate, [prompt])
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


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_without_models_asks_for_a_name(status: int) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    config = ServerConfig(server=("http://one/v1",))
    with (
        ServerGenerate(config, SamplingConfig(), transport=transport, sleep=lambda seconds: None) as generate,
        pytest.raises(DataError, match="--model"),
    ):
        generate.start(0, PROMPT)


PROMPT = Prompt(messages=[{"role": "user", "content": "q"}], tools=(), template_kwargs={}, seed=0)


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_knows_no_token_ids_is_asked_without_them(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """transformers serve refuses every field that it doesn't know."""
    bodies: list[dict[str, Any]] = []

    def strict(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if "return_token_ids" in bodies[-1]:
            return httpx.Response(status, json={"detail": "Unexpected fields in the request: {'return_token_ids'}"})
        message = {"role": "assistant", "content": "own"}
        return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}]})

    config = ServerConfig(server=("http://one/v1",), model="m", concurrency=1)
    with ServerGenerate(config, SamplingConfig(), transport=httpx.MockTransport(strict)) as generate:
        first, second = answer_all(generate, [PROMPT, PROMPT])
    assert isinstance(first, Answer)
    assert isinstance(second, Answer)
    assert len(bodies) == 3, "once refused, not asked for again"
    assert "tokenised again" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_shut_door_is_no_prompt_s_fault(status: int) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="who are you"))
    config = ServerConfig(server=("http://one/v1",), model="m")
    with (
        ServerGenerate(config, SamplingConfig(), transport=transport) as generate,
        pytest.raises(DataError, match=rf"status {status} \(who are you\): check --server .* --api-key"),
    ):
        answer_all(generate, [PROMPT])


CLIENT = """
import sys
from draftsmith.data.regenerate import RegenerateConfig, regenerate
from draftsmith.data.servers import ServerConfig, ServerGenerate
config = RegenerateConfig()
with ServerGenerate(ServerConfig(server=(sys.argv[1],), concurrency=4), config.sampling) as generate:
    regenerate(sys.argv[2], sys.argv[3], generate, config)
"""


@pytest.mark.long
def test_a_killed_client_loses_no_finished_answer(tmp_path: Path) -> None:
    """SIGKILL three times: what was answered before the last moment is never asked for again."""
    server, out = _Server(), tmp_path / "own.jsonl"
    server.seconds = lambda content: 0.02 * (1 + int(content) % 7)
    rows = [
        {"messages": [{"role": role, "content": f"{index}{turn}"} for turn in range(3) for role in ROLES]}
        for index in range(60)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server.running() as url:
        command = [sys.executable, "-c", CLIENT, url, str(tmp_path / "chats.jsonl"), str(out)]
        for num_answers in (20, 70, 120):
            with subprocess.Popen(command) as process:
                while len(server.spans) < num_answers:
                    assert process.poll() is None
                    time.sleep(0.002)
                process.kill()
            assert not out.exists()
        subprocess.run(command, check=True)
    assert len(server.asked) == 180
    assert server.asked.total() <= 180 + 3 * 8, "asked again: what 4 threads were at, or had just read"
    for index, row in enumerate(rows_of(out)):
        contents = [message["content"] for message in row["messages"]]
        assert contents == [text for turn in range(3) for text in (f"{index}{turn}", f"own {index}{turn}")]
    assert len(rows_of(out)) == 60


class _TransformersServe:
    """`transformers serve` on a local folder, to be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder
        self.url = f"http://127.0.0.1:{self._port}/v1"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(self._folder)]
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--device", "cpu", "--log-level", "error"]
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                self._wait(process)
                yield process
            finally:
                process.kill()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(240):
            assert process.poll() is None, "the server ended while starting"
            try:
                if httpx.get(self.url.replace("/v1", "/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError("the server didn't come up within two minutes")


def _kill_after(process: subprocess.Popen[bytes], journal: Path, num_lines: int) -> threading.Thread:
    """Kill the server, requests under way, once the journal holds so many lines."""

    def watch() -> None:
        for _ in range(60_000):
            if journal.exists() and journal.read_bytes().count(b"\n") >= num_lines:
                break
            time.sleep(0.002)
        process.kill()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.long
@pytest.mark.skipif(not is_serve_available(), reason="transformers serve needs fastapi, uvicorn and openai")
def test_transformers_serve_killed_half_way_leaves_a_complete_output_without_doubles(tmp_path: Path) -> None:
    num_rows = 60
    chats, out = tmp_path / "chats.jsonl", tmp_path / "own.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": "foreign"}]}
        for index in range(num_rows)
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = _TransformersServe(save_tiny("llama", tmp_path / "tiny"))
    config = RegenerateConfig(sampling=SamplingConfig(max_new_tokens=12))
    asked = ServerConfig(server=(server.url,), model=str(tmp_path / "tiny"), concurrency=3, retries=1)
    with server.running() as process:
        watcher = _kill_after(process, tmp_path / "own.jsonl.partial", 1 + num_rows // 2)
        with ServerGenerate(asked, config.sampling) as generate, pytest.raises(DataError, match="no answer from"):
            regenerate(chats, out, generate, config)
        watcher.join()
    assert not out.exists(), "an output is whole or absent"
    kept = (tmp_path / "own.jsonl.partial").read_bytes().count(b"\n") - 1
    assert num_rows // 2 <= kept < num_rows
    questions: list[str] = []

    class Counted(ServerGenerate):
        def start(self, ticket: int, prompt: Prompt) -> None:
            questions.append(str(prompt.messages[-1]["content"]))
            super().start(ticket, prompt)

    with server.running(), Counted(asked, config.sampling) as generate:
        report = regenerate(chats, out, generate, config)
    assert len(questions) == len(set(questions)) == num_rows - kept, "what was finished isn't asked again"
    assert (report.rows_in, report.rows_out) == (num_rows, num_rows)
    regenerated = rows_of(out)
    assert [row["messages"][0]["content"] for row in regenerated] == [f"q{index}" for index in range(num_rows)]
    assert not any(row["messages"][-1]["content"] == "foreign" for row in regenerated)
