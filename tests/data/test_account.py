from __future__ import annotations

import io
import json

from rich.console import Console

from draftsmith.data.account import MAX_EXAMPLES, Account
from draftsmith.data.conversations import Skip


def filled(rows: int) -> Account:
    account = Account(rows_in=rows, rows_kept=rows, documents=rows, tokens=10 * rows, supervised_tokens=4 * rows)
    account.whole_tokens, account.total_tokens = 10 * rows, 15 * rows
    account.template_arguments["{}"] = rows
    for index in range(5):
        account.skip(Skip("odd [/row]", "detail"), f"f:{index}")
    account.leave_out_turn(Skip("merged"), "f:9")
    return account


def test_examples_can_be_written_to_any_file() -> None:
    account = Account()
    account.skip(Skip("unknown role", "\ud800 user"), "f:1")
    assert account.examples["unknown role"] == ["f:1: \\ud800 user"]


def test_accounts_of_shards_add_up() -> None:
    total = Account()
    total.merge(filled(3))
    total.merge(filled(4))
    assert total.rows_in == total.rows_kept + total.skipped.total() == 17
    assert total.token_multiplier == 1.5
    assert total.turns_left_out == {"merged": 2}
    assert len(total.examples["odd [/row]"]) == MAX_EXAMPLES


def test_an_account_survives_json() -> None:
    account = filled(2)
    again = Account.from_json(json.loads(json.dumps(account.as_json())))
    assert again == account


def test_the_table_shows_what_looks_like_markup_as_it_is() -> None:
    screen = io.StringIO()
    filled(2).print(Console(file=screen, width=150), "data[0]")
    for part in ("odd [/row]", "f:0: detail", "turns not learnt: merged", "1.50x", "40% supervised", "data[0]"):
        assert part in screen.getvalue()
