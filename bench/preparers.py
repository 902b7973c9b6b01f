"""One preparation of conversations in a process of its own, for bench/prepare.py: ours, SpecForge's or speculators'.

    python bench/preparers.py NAME CHATS TOKENIZER_FOLDER OUT --processes 2

CHATS holds one {"conversations": [{"role", "content"}, ...]} a line. The last line is one JSON object: rows, seconds by
the clock and of all processors from opening the file to the saved data set, imports left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast

MAX_LENGTH = 8192
SPECFORGE_TEMPLATE = "lfm"
"""Its ChatML that puts no system prompt of its own before the conversation."""


def processor_seconds() -> float:
    """Of this process and of those it has waited for."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def ours(chats: Path, folder: Path, out: Path, processes: int) -> Callable[[], tuple[int, float]]:
    from transformers import AutoTokenizer

    from draftsmith.data.prepare import PrepareConfig, prepare
    from draftsmith.data.tokenize import TokenizeConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config = PrepareConfig(tokenize=TokenizeConfig(max_length=MAX_LENGTH), workers=processes)

    def run() -> tuple[int, float]:
        num_rows = len(prepare(chats, tokenizer, out, config))
        # Processor time of the tokenising processes counts once the fork server, their parent, has been waited for.
        cast(Any, forkserver)._forkserver._stop()
        return num_rows, 0.0

    return run


def specforge(chats: Path, folder: Path, out: Path, processes: int) -> Callable[[], tuple[int, float]]:
    from datasets import load_dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def run() -> tuple[int, float]:
        rows = load_dataset("json", data_files=str(chats), split="train")
        built = build_eagle3_dataset(
            rows, tokenizer, chat_template=SPECFORGE_TEMPLATE, max_length=MAX_LENGTH, num_proc=processes
        )
        built.save_to_disk(str(out))
        return len(built), 0.0

    return run


def speculators(chats: Path, folder: Path, out: Path, processes: int) -> Callable[[], tuple[int, float]]:
    """It asks a server to render every turn twice; here the smallest one that does, its processor time counted in."""
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    command = [sys.executable, __file__, "serve", str(chats), str(folder), str(out)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()

    def spent() -> float:
        with urllib.request.urlopen(f"{url}/spent") as reply:
            return float(reply.read())

    def run() -> tuple[int, float]:
        before = spent()
        built, _ = load_and_preprocess_dataset(
            str(folder), [str(chats)], seq_length=MAX_LENGTH, build_dataset_num_proc=processes, render_endpoint=url
        )
        built.save_to_disk(str(out))
        by_server = spent() - before
        server.kill()
        return len(built), by_server

    return run


class Renderer(BaseHTTPRequestHandler):
    """`/v1/chat/completions/render` as vLLM answers it, without vLLM."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    tokenizer: Any

    def do_GET(self) -> None:
        self._send(str(processor_seconds()))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=body["add_generation_prompt"], return_dict=False
        )
        self._send(json.dumps({"token_ids": ids[: body["truncate_prompt_tokens"]]}))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def serve(folder: Path) -> None:
    from transformers import AutoTokenizer

    Renderer.tokenizer = AutoTokenizer.from_pretrained(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), Renderer) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


PREPARERS = {"ours": ours, "specforge": specforge, "speculators": speculators}


def main() -> None:
    parser = argparse.ArgumentParser(description="run one preparation")
    parser.add_argument("name", choices=(*PREPARERS, "serve"))
    parser.add_argument("chats", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.name == "serve":
        serve(options.tokenizer)
        return
    run = PREPARERS[options.name](options.chats, options.tokenizer, options.out, options.processes)
    clock, processors = time.perf_counter(), processor_seconds()
    num_rows, by_server = run()
    clock, processors = time.perf_counter() - clock, processor_seconds() - processors
    print(json.dumps({"rows_out": num_rows, "clock_s": clock, "processor_s": processors + by_server}))


if __name__ == "__main__":
    main()
