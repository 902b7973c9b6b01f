"""Every named fault is still caught by the tests named with it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.mutate import ROOT, failed_test, judge, mutate
from tests.mutations import MUTATIONS, Mutation

NAMES = [mutation.name for mutation in MUTATIONS]


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_still_applies(mutation: Mutation, tmp_path: Path) -> None:
    """A fault that no longer finds its text, or its tests, would pass for caught without having been tried."""
    path = tmp_path / mutation.file
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "src" / "draftsmith" / mutation.file, path)
    mutate(mutation, tmp_path)
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert mutation.tests
    for test in mutation.tests:
        assert (ROOT / "tests" / test.split("::")[0]).is_file()


def test_a_fault_without_its_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a = 1\nb = 1\n")
    with pytest.raises(ValueError, match=r"occurs 2 times in x\.py, not once"):
        mutate(Mutation("twice", "x.py", "= 1", "= 2", ("test_x.py",)), tmp_path)


def test_a_harmless_change_is_not_taken_for_caught() -> None:
    harmless = Mutation("none", "errors.py", '"""Root of the tree."""', '"""The root."""', ("test_errors.py",))
    verdict = judge(harmless)
    assert not verdict.is_red
    assert "2 passed" in verdict.output


def test_the_failed_test_is_named_without_its_parameters() -> None:
    assert failed_test("F\nFAILED tests/a/test_x.py::test_one[3-x] - assert 1 == 2\n1 failed\n") == "test_one"
    assert failed_test("3 passed\n") == ""


@pytest.mark.parametrize("page", ["fixed-shape.md", "faults.md"])
def test_every_test_that_the_documentation_names_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    assert named
    assert named <= defined | {path.stem for path in files}


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_is_caught(mutation: Mutation) -> None:
    verdict = judge(mutation)
    assert verdict.is_red, verdict.output
    table = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    assert verdict.row in table, "write the table again: python tests/mutate.py --write docs/faults.md"
