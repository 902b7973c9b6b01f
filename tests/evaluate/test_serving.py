"""A server that drafts as we do passes, and each way of drafting otherwise is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import DecodeLimits, decode
from draftsmith.evaluate.parity import Verdict
from draftsmith.evaluate.prompts import Prompt
from draftsmith.evaluate.server import Server
from draftsmith.evaluate.serving import ServingConfig, decode_as_served, verify_server
from tests.evaluate.engine import Engine, running
from tests.evaluate.overfit import PROMPTS, overfit, random_drafter
from tests.families import fresh_target

LENGTH = 24
ASKED = [Prompt(source="test", token_ids=tuple(ids)) for ids in PROMPTS[:4]]


def engine(**changes: Any) -> Engine:
    case = overfit("llama")
    return replace(Engine(target=case.target, drafter=case.drafter), **changes)


def look(served: Engine, prompts: list[Prompt] | None = None, **changes: Any) -> Verdict:
    case = overfit("llama")
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "tolerance": 0.0} | changes
    with running(served) as url, Server(url) as server:
        return verify_server(server, case.target, case.drafter, ASKED if prompts is None else prompts, **options)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_drafts_alike_is_told_so(kind: str) -> None:
    verdict = look(engine(kind=kind, lag=2))
    assert verdict.passed, str(verdict)
    assert "accepted drafts, prompt by prompt" in str(verdict)
    assert "all 4 answers are the same" in str(verdict)
    assert "serves as it trained" in str(verdict)


def test_an_engine_without_token_ids_is_compared_by_its_text() -> None:
    assert look(engine(gives_ids=False)).passed
    other = look(engine(gives_ids=False, target=fresh_target("llama", seed=7)))
    assert not other.passed


def test_counts_are_those_of_whole_blocks_up_to_the_limit() -> None:
    """An engine drafts whole blocks near the limit and counts the last step before its cut; `decode` narrows them."""
    case = overfit("llama")
    for limit in (1, 2, 5, 9, 17):
        served = decode_as_served(case.target, case.drafter, PROMPTS[0], limit)
        free = decode(case.target, case.drafter, case.target.ends(), PROMPTS[0], DecodeLimits(max_new_tokens=40))
        assert served.token_ids == free.token_ids[:limit]
        assert served.steps == free.steps[: len(served.steps)]
        assert (
            1 + served.committed >= limit > (1 + served.committed - served.steps[-1].committed if served.steps else 0)
        )


def test_another_drafter_is_seen_in_counts_and_places() -> None:
    verdict = look(engine(drafter=random_drafter(overfit("llama").drafter.config)), tolerance=0.05)
    assert [check.name for check in verdict.checks if not check.passed] == ["counts", "places"]
    assert "Likely cause: the server drafts otherwise" in str(verdict)


def test_near_counts_pass_within_a_tolerance_only() -> None:
    strict, lenient = look(engine(forgets=1)), look(engine(forgets=1), tolerance=0.2)
    assert not strict.passed
    assert "prompts differ" in str(strict)
    assert "rounding" in str(strict)
    assert lenient.passed, str(lenient)
    assert "within 20%" in str(lenient)


def test_another_target_is_seen_in_the_text() -> None:
    verdict = look(engine(target=fresh_target("llama", seed=7)), tolerance=0.05)
    assert not verdict.passed
    assert "another target is served" in str(verdict)


def test_F02_another_number_of_drafts_a_step_is_the_block_size() -> None:
    verdict = look(engine(width=8))
    assert [check.name for check in verdict.checks if not check.passed] == ["block"]
    assert "num_speculative_tokens should be 7" in str(verdict)


def test_G01_a_server_with_another_template_is_caught() -> None:
    chat = [Prompt(source="test", messages=({"role": "user", "content": "Hello"},))]
    assert look(engine(), prompts=chat).passed
    verdict = look(engine(template_suffix=(10, 10)), prompts=chat)
    assert "Likely cause: chat template" in str(verdict)


def test_other_traffic_is_refused_because_it_would_be_counted() -> None:
    with pytest.raises(ConfigError, match="answered other requests meanwhile"):
        look(engine(stray_tokens=3))


def test_a_server_that_cannot_be_compared_says_how_to_start_it() -> None:
    with (
        running(engine(kind="plain")) as url,
        pytest.raises(ConfigError, match=r"without drafting.*speculative-config"),
    ):
        Server(url)
    with pytest.raises(ConfigError, match=r"no answer from http://127.0.0.1:9/v1/models .*start the server"):
        Server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"refuses a prompt .status 400: .*context too long"):
        look(engine(limit=3))
    with pytest.raises(ConfigError, match="no spec_accept_histogram"):
        look(engine(kind="sglang", width=-1))
    with pytest.raises(ConfigError, match="no prompts to replay"):
        look(engine(), prompts=[])
    with pytest.raises(ConfigError, match="--tolerance 2"):
        ServingConfig(tolerance=2)
