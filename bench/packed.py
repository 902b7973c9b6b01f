"""What does a draft-verify step cost on this CPU, with weights laid out once for blocks of rows and without?

    python bench/packed.py --threads 2

SmolLM2 in fp32 and the packaged drafter. Each line: milliseconds of a step of plain decoding, then the cost of a step
that verifies 1, 2, ... drafts, in plain steps (sizes take turns, the median counts), then milliseconds a step of one
whole answer. Both ways alternate, so that a busy machine shows as two lines of one way that differ. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from draftsmith.evaluate.decode import DecodeLimits, decode, plain_decode
from draftsmith.evaluate.export import PACKAGED, drafter_folder, load_zlab
from draftsmith.evaluate.pace import step_costs
from draftsmith.evaluate.prompts import BUILT_IN, encode_prompt, load_prompts
from draftsmith.target import packed
from draftsmith.target.model import TargetConfig, load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=48, help="of the whole answer")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_target(TargetConfig(target="smollm2", dtype="float32"), "cpu")
    _, drafter = load_zlab(drafter_folder(PACKAGED))
    prompt = encode_prompt(target, load_prompts(BUILT_IN, 1)[0], {})
    limits = DecodeLimits(max_new_tokens=arguments.tokens)
    rows: list[dict[str, Any]] = []
    for way in ("as torch multiplies", "laid out once") * arguments.rounds:
        with ExitStack() as stack:
            if way != "laid out once":
                stack.enter_context(patch.object(packed, "is_available", return_value=False))
            stack.enter_context(packed.packed_products(target.model, drafter))
            plain = plain_decode(target, prompt, limits)
            costs = step_costs(target, drafter, prompt)
            answer = decode(target, drafter, target.ends(), prompt, limits)
        plain_ms = 1e3 * plain.seconds / (len(plain.token_ids) - 1)
        step_ms = 1e3 * answer.seconds / len(answer.steps)
        rows.append({"way": way, "plain_ms": plain_ms, "costs": costs, "step_ms": step_ms, "tau": answer.tau})
        print(
            f"{way:20s} {plain_ms:6.0f} ms  {' '.join(f'{cost:5.2f}' for cost in costs)}  {step_ms:6.0f} ms", flush=True
        )
    print(json.dumps({"threads": arguments.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
