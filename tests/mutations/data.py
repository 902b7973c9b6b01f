"""Faults of the data side: regeneration, its journal, and rows of the common formats."""

from __future__ import annotations

from tests.mutations.mutation import fault

REGENERATE, EMBEDDED, SERVERS = "data/test_regenerate.py", "data/test_embedded.py", "data/test_servers.py"
DAMAGED = "data/test_journal.py::test_a_damaged_line_costs_its_own_answer_only"
TWO = "data/test_journal.py::test_two_at_once_are_refused"
DISK = "data/test_journal.py::test_lines_reach_the_disk_at_intervals"
HARMLESS = "data/test_conversations.py::test_rows_changed_without_harm_are_all_kept_and_teach_the_same"
HARMFUL = "data/test_conversations.py::test_rows_changed_with_harm_are_all_refused_for_that"
BUSY = f"{SERVERS}::test_the_servers_are_kept_busy_whatever_the_answers_lengths"
FAILED = f"{SERVERS}::test_answers_under_way_when_a_request_fails_are_kept"

MUTATIONS = (
    # regeneration flows
    fault(
        "short answers wait for the longest of their batch",
        "data/regenerate.py",
        "        while len(open_rows) >= generate.window:\n",
        "        while len(open_rows) >= generate.window or (open_rows and index % generate.window == 0):\n",
        BUSY,
    ),
    fault(
        "any number of rows is open",
        "data/regenerate.py",
        "while len(open_rows) >= generate.window",
        "while len(open_rows) >= 10**6",
        REGENERATE,
    ),
    fault(
        "answers of rows not finished aren't kept",
        "data/regenerate.py",
        "journal.add_answer(index, row.num_answers - 1, asdict(answer))",
        "pass",
        REGENERATE,
    ),
    fault(
        "a row that ends with a question gets no answer",
        "data/regenerate.py",
        'if messages[-1]["role"] == "user":',
        "if False:",
        REGENERATE,
    ),
    fault(
        "the first failure loses the answers under way",
        "data/servers.py",
        "                self._give_up(error)",
        "                raise error",
        FAILED,
    ),
    fault(
        "requests are begun behind a failure",
        "data/servers.py",
        "        if self._failure is None:\n            future",
        "        if True:\n            future",
        FAILED,
    ),
    fault(
        "rows that ended stay in the batch",
        "data/embedded.py",
        "and all(type(layer) is DynamicLayer for layer in self._cache.layers)",
        "and False",
        EMBEDDED,
    ),
    fault(
        "a row that joins is padded on the right",
        "data/embedded.py",
        "(width - mask_RW.shape[1], 0)",
        "(0, width - mask_RW.shape[1])",
        EMBEDDED,
    ),
    fault(
        "positions count the padding",
        "data/embedded.py",
        "len(row.prompt_ids) + len(row.sampled) - 1",
        "self._mask_RW.shape[1]",
        EMBEDDED,
    ),
    # its journal
    fault("a torn line stays in the journal", "data/journal.py", "self._file.truncate(whole)", "pass", DAMAGED),
    fault("a damaged line ends the resume", "data/journal.py", "pass  # its", "raise  # its", DAMAGED),
    fault("a lost turn shifts those behind it", "data/journal.py", ' if line["turn"] == turn', "", DAMAGED),
    fault("two runs write one journal", "data/journal.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH", TWO),
    fault("lines never reach the disk", "data/journal.py", "if time.monotonic() - self._synced", "if -1.0", DISK),
    # rows
    fault(
        "null keys hide the others",
        "data/conversations.py",
        "cast(dict[str, Any], raw).items() if value is not None}\n    given",
        "cast(dict[str, Any], raw).items()}\n    given",
        HARMLESS,
    ),
    fault(
        "content parts join with a blank behind them",
        "data/conversations.py",
        '_clean("\\n".join(texts))',
        '_clean("\\n".join([*texts, ""]))',
        HARMLESS,
    ),
    fault(
        "half a surrogate pair reaches the tokenizer",
        "data/conversations.py",
        '        raise _UnusableError("text holds half of a surrogate pair") from None',
        "        return encodable(text)",
        HARMFUL,
    ),
)
