"""Answers from OpenAI-compatible servers (vLLM, SGLang, transformers serve ...): many URLs, retries, no waiting for
the slowest."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import httpx

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt, SamplingConfig
from draftsmith.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

BUSY = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Statuses worth another try; any other from 400 on refuses this prompt alone."""
SHUT = frozenset((401, 403, 404, 405))
"""Statuses that no prompt is to blame for: the key, the model's name or the URL is wrong."""
IDS_FIELD = "return_token_ids"
"""Asks for token ids; known to vLLM, unknown to others, some of which refuse what they don't know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where answers come from."""

    server: tuple[str, ...] = ()
    """Base URLs, such as http://localhost:8000/v1: requests go round them, and past one that doesn't answer. Empty
    generates in this process."""
    model: str | None = None
    """Name of the model as the server knows it; left out, the first that it lists."""
    api_key: str = "none"
    """Sent as a bearer token."""
    concurrency: int = 32
    """Requests under way at once, over all servers."""
    retries: int = 8
    """Tries of a request after the first, with waits of 1, 2, 4 ... seconds up to `longest_wait`."""
    longest_wait: float = 30.0
    """Longest wait between two tries, in seconds."""
    timeout: float = 600.0
    """Seconds that one answer may take."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.retries < 0:
            raise ConfigError("--concurrency must be at least 1 and --retries at least 0")


class ServerGenerate:
    """A `Generate` that asks servers. A context manager: it owns connections and threads.

    Each thread takes the next prompt as soon as it has an answer. After the first request that fails for good no other
    is begun; those under way are waited for and handed out before the failure is raised.
    """

    def __init__(
        self,
        config: ServerConfig,
        sampling: SamplingConfig,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if not config.server:
            raise ConfigError("no server given: --server http://localhost:8000/v1")
        self._config = config
        self._sampling = sampling
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._under_way: set[Future[Answer | Skip]] = set()
        self._ended: queue.SimpleQueue[tuple[int, Future[Answer | Skip]]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="regenerate")
        self._client = httpx.Client(
            timeout=httpx.Timeout(config.timeout, connect=10.0),
            headers={"Authorization": f"Bearer {config.api_key}"},
            limits=httpx.Limits(max_connections=config.concurrency),
            transport=transport,
        )
        self._next = 0
        self._lock = threading.Lock()
        self._model = config.model
        self._asks_for_ids = True

    def __enter__(self) -> ServerGenerate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    @property
    def window(self) -> int:
        """Twice the requests under way, so that a thread never waits for its next prompt."""
        return 2 * self._config.concurrency

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Queue a prompt.

        Raises:
            DataError: no model was named, and the server lists none.
        """
        if self._model is None:
            self._model = self._first_model()
        if self._failure is None:
            future = self._pool.submit(self._ask, prompt)
            self._under_way.add(future)
            future.add_done_callback(lambda ended: self._ended.put((ticket, ended)))

    def finished(self) -> list[tuple[int, Answer | Skip]]:
        """Answers that came since the last call, at least one.

        Raises:
            DataError: no server answered within all retries, or one knows no such key, model or URL.
        """
        answers: list[tuple[int, Answer | Skip]] = []
        while self._under_way and not (answers and self._ended.empty()):
            ticket, future = self._ended.get()
            self._under_way.remove(future)
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                answers.append((ticket, future.result()))
            elif self._failure is None:
                self._give_up(error)
        if not answers and self._failure is not None:
            raise self._failure
        return answers

    def _give_up(self, failure: BaseException) -> None:
        """Begin no other request; those under way get no further try."""
        self._failure = failure
        self._stopped.set()
        for future in tuple(self._under_way):
            future.cancel()

    def _first_model(self) -> str:
        reply = self._send("GET", "/models", None)
        models = cast(list[dict[str, Any]], reply.json().get("data") or []) if reply.status_code < 400 else []
        if not models:
            raise DataError(
                f"{self._config.server[0]} lists no model (status {reply.status_code}): name it with --model"
            )
        return str(models[0]["id"])

    def _ask(self, prompt: Prompt) -> Answer | Skip:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in prompt.messages],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": self._sampling.max_new_tokens,
            "seed": prompt.seed,
        }
        if prompt.tools:
            body["tools"] = [dict(tool) for tool in prompt.tools]
        if prompt.template_kwargs:
            body["chat_template_kwargs"] = dict(prompt.template_kwargs)
        reply = self._send("POST", "/chat/completions", body | ({IDS_FIELD: True} if self._asks_for_ids else {}))
        if reply.status_code in (400, 422) and IDS_FIELD in reply.text:
            logger.warning("the server returns no token ids: answers will be tokenised again when the data is prepared")
            self._asks_for_ids = False
            reply = self._send("POST", "/chat/completions", body)
        if reply.status_code in SHUT:
            raise DataError(
                f"{reply.url} answers with status {reply.status_code} ({reply.text[:120]}): check --server (it ends in "
                "/v1), --model and --api-key, then run the same command again; finished rows are kept"
            )
        if reply.status_code >= 400:
            return Skip("the server refused the prompt", f"status {reply.status_code}: {reply.text[:120]}")
        return parse_answer(reply)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One request, retried over the servers with growing waits."""
        problem = ""
        for attempt in range(self._config.retries + 1):
            if attempt:
                self._sleep(min(2.0 ** (attempt - 1), self._config.longest_wait))
                if self._stopped.is_set():
                    break
            url = self._next_url()
            try:
                reply = self._client.request(method, url.rstrip("/") + path, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__} from {url}"
                continue
            if reply.status_code not in BUSY or (method == "GET" and reply.status_code == 500):
                return reply  # transformers' own server fails in listing models when its hub cache is empty
            problem = f"status {reply.status_code} from {url}"
        raise DataError(
            f"no answer from {', '.join(self._config.server)} after {self._config.retries + 1} tries ({problem}): "
            "start the server and run the same command again; finished rows are kept"
        )

    def _next_url(self) -> str:
        with self._lock:
            self._next += 1
            return self._config.server[(self._next - 1) % len(self._config.server)]


def parse_answer(reply: httpx.Response) -> Answer | Skip:
    """The first choice of a chat completion, with token ids where the server gives them (vLLM: `return_token_ids`)."""
    try:
        body = cast(dict[str, Any], reply.json())
        choice = cast(dict[str, Any], body["choices"][0])
        message = cast(dict[str, Any], choice["message"])
    except (ValueError, KeyError, IndexError, TypeError):
        return Skip("the server's reply isn't a chat completion", reply.text[:120])
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts:
        kept["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    completion_ids = choice.get("token_ids")
    return Answer(
        message=kept,
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_ids=tuple(prompt_ids) if prompt_ids else None,
        completion_ids=tuple(completion_ids) if completion_ids else None,
    )
