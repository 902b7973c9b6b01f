"""Fault injection: each named fault is put into a copy of src, and the tests named with it must turn red.

    python tests/mutate.py                       all of them, as a table
    python tests/mutate.py --only clip           those whose name contains a word
    python tests/mutate.py --write docs/faults.md

To add one, add a line to a list in `tests/mutations/`: name, file below src/draftsmith, the text to replace (which must
occur there exactly once), what it becomes, and the test files or node ids, below tests/, that should catch it.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.mutations import MUTATIONS, Mutation  # noqa: E402  (a script finds its own folder only)

TIMEOUT = 900
"""Seconds for the tests of one fault."""

HEADER = """# Faults that the tests were seen to catch

Each line is a fault that was put into a copy of the source, one at a time, and the tests that turned red for it. Codes
such as C13 name public reports of the same fault in other trainers. Written by
`python tests/mutate.py --write docs/faults.md`; `make test-long` runs every line again.

| fault | file | caught by | red |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutation. Red is failing tests, not a test run that could not start."""

    mutation: Mutation
    is_red: bool
    failed: str
    """The first test that failed."""
    output: str

    @property
    def row(self) -> str:
        caught_by = f"`{self.failed}`" if self.is_red else ", ".join(self.mutation.tests)
        return f"| {self.mutation.name} | `{self.mutation.file}` | {caught_by} | {'yes' if self.is_red else '**no**'} |"


def mutate(mutation: Mutation, package: Path) -> None:
    """Put the fault into the package at `package`."""
    path = package / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: its text occurs {text.count(mutation.old)} times in {mutation.file}, not once"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def failed_test(output: str) -> str:
    """Name of the failed test that pytest reports, without its parameters."""
    match = re.search(r"^FAILED \S+?::(\w+)", output, re.MULTILINE)
    return match.group(1) if match else ""


@functools.cache
def fork_server() -> ForkServerContext:
    """Processes that start with the large libraries loaded and without draftsmith, of which each takes its own copy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hypothesis", "torch", "transformers.models.qwen3.modeling_qwen3"])
    return context


def run_pytest(source: str, log: str, arguments: list[str]) -> None:
    """In a process of its own: pytest on the package below `source` instead of the installed one, output to `log`."""
    with open(log, "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(ROOT)
    # A fork server is one a process: another test may have had it load the package already, unmutated.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("draftsmith", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, source)
    sys.exit(pytest.main(arguments))


def run_tests(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Exit code (None where it ran out of time) and output of `tests` on the package below `source`."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", "-rf", "--assert=plain"]
    options += ["--hypothesis-profile", "unshrunk"]
    arguments = [*options, *(str(ROOT / "tests" / test) for test in tests)]
    log = source / "log"
    process = fork_server().Process(target=run_pytest, args=(str(source), str(log), arguments))
    process.start()
    process.join(TIMEOUT)
    code = process.exitcode
    process.kill()
    return code, log.read_text(encoding="utf-8")


def judge(mutation: Mutation) -> Verdict:
    """Inject one fault into a fresh copy and run its tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder)
        package = source / "draftsmith"
        shutil.copytree(ROOT / "src" / "draftsmith", package, ignore=shutil.ignore_patterns("__pycache__"))
        mutate(mutation, package)
        code, output = run_tests(source, mutation.tests)
    failed = failed_test(output)
    return Verdict(mutation, code == 1 and failed != "", failed, output)


def main() -> int:
    parser = argparse.ArgumentParser(description="inject each named fault and see its tests turn red")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, chosen):
            print(verdict.row, flush=True)
            if not verdict.is_red:
                print(verdict.output[-2000:], flush=True)
            verdicts.append(verdict)
    if options.write is not None:
        options.write.write_text(HEADER + "\n".join(verdict.row for verdict in verdicts) + "\n", encoding="utf-8")
    missed = [verdict.mutation.name for verdict in verdicts if not verdict.is_red]
    print(
        f"{len(verdicts) - len(missed)} of {len(verdicts)} faults caught"
        + "".join(f"\nmissed: {name}" for name in missed)
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
