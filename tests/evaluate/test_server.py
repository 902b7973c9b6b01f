"""What a server tells about its drafting, read from its own words."""

from __future__ import annotations

import pytest

from draftsmith.errors import ConfigError
from draftsmith.evaluate import server as module
from draftsmith.evaluate.server import Server, read_counters
from tests.evaluate.engine import Engine, running
from tests.evaluate.overfit import PROMPTS, overfit

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 84.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 2.6e+01
process_open_fds 30.0
"""


def test_counters_are_summed_over_engines_by_place() -> None:
    counters = read_counters(PAGE)
    assert counters is not None
    assert (counters.num_drafts, counters.num_drafted, counters.num_generated) == (15, 84, 26)
    assert counters.accepted_by_place == (9, 4)
    assert read_counters("process_open_fds 30.0") is None


def test_a_server_that_never_counts_its_answer_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METRICS_WAIT", 0.2)
    case = overfit("llama")
    engine = Engine(target=case.target, drafter=case.drafter, lag=1000)
    with running(engine) as url, Server(url) as server, pytest.raises(ConfigError, match="didn't count an answer"):
        server.answer(PROMPTS[0], 4)


def test_a_url_without_models_is_no_server() -> None:
    case = overfit("llama")
    engine = Engine(target=case.target, drafter=case.drafter)
    engine.reply = lambda path, body: (404, "<html>")
    with running(engine) as url, pytest.raises(ConfigError, match=r"lists no model \(status 404\)"):
        Server(url)
