"""src keeps its budgets and import directions, and each rule can fail.

The first tests run the rules of `budgets.py` on src, the others on small sources that break one rule each, beside the
nearest source that doesn't.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import budgets
from tests.budgets import RULES, Rule, load, without_test

ROOT = Path(__file__).parents[1]

UNMIRRORED: frozenset[str] = frozenset({"draftsmith.drafter.cross_entropy"})
"""Modules without a test file of their own: kernels, which tests/gpu tests."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_src_keeps(rule: Rule) -> None:
    modules = load(ROOT / "src")
    assert modules
    assert rule(modules) == []


def test_tests_mirror_src() -> None:
    missing = without_test(load(ROOT / "src"), ROOT / "tests")
    assert missing - UNMIRRORED == set(), "write tests/<folder>/test_<module>.py"
    assert UNMIRRORED - missing == set(), "these have tests now: take them off UNMIRRORED"


def complaints(rule: Rule, source: Path, files: dict[str, str]) -> list[str]:
    """Write `files` (paths below the package) under `source` and run `rule` on them."""
    for name, text in files.items():
        path = source / budgets.PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return rule(load(source))


def function_of(lines: int) -> str:
    return "def long() -> None:\n" + "    print()\n" * (lines - 1)


def one_file(text: str) -> dict[str, str]:
    return {"records.py": text}


BROKEN: dict[str, tuple[Rule, dict[str, str], str]] = {
    "61-line function": (budgets.long_functions, one_file(function_of(61)), "records.py:1 long has 61 lines"),
    "61-line method": (
        budgets.long_functions,
        one_file("class C:\n    async def long(self):\n" + "        print()\n" * 60),
        "records.py:2 long has 61 lines",
    ),
    "401-line file": (budgets.long_files, one_file("x = 1\n" * 401), "records.py:1 401 lines"),
    "8 parameters": (
        budgets.many_parameters,
        one_file("def f(a, /, b, c, *rest, d, e, f, **more): ...\n"),
        "records.py:1 f has 8 parameters",
    ),
    "8 parameters besides self": (
        budgets.many_parameters,
        one_file("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"),
        "records.py:2 f has 8 parameters",
    ),
    "errors import records": (
        budgets.upward_imports,
        {"errors.py": "from draftsmith.records import X\n", "records.py": ""},
        "errors.py:1 imports draftsmith.records",
    ),
    "module imported by name from the package": (
        budgets.upward_imports,
        {"errors.py": "from draftsmith import records\n", "records.py": ""},
        "errors.py:1 imports draftsmith.records",
    ),
    "plain import": (
        budgets.upward_imports,
        {"records.py": "import draftsmith.config as c\n"},
        "records.py:1 imports draftsmith.config",
    ),
    "import for types only": (
        budgets.upward_imports,
        {"records.py": "if TYPE_CHECKING:\n    from draftsmith.cli import X\n"},
        "records.py:2 imports draftsmith.cli",
    ),
    "drafter imports its sibling target": (
        budgets.upward_imports,
        {"drafter/mask.py": "from draftsmith.target.model import X\n"},
        "mask.py:1 imports draftsmith.target.model",
    ),
    "evaluate imports its sibling pipeline": (
        budgets.upward_imports,
        {"evaluate/decode.py": "from draftsmith.pipeline.buffers import X\n"},
        "decode.py:1 imports draftsmith.pipeline.buffers",
    ),
    "train imports evaluate": (
        budgets.upward_imports,
        {"train/step.py": "from draftsmith.evaluate.decode import X\n"},
        "step.py:1 imports draftsmith.evaluate.decode",
    ),
    "a pipeline part imports run": (
        budgets.upward_imports,
        {"pipeline/channel.py": "from draftsmith.pipeline.run import X\n"},
        "channel.py:1 imports draftsmith.pipeline.run",
    ),
    "a part outside the order": (budgets.upward_imports, {"utils.py": ""}, "utils.py:1 'utils' has no place"),
    "cycle of three": (
        budgets.import_cycles,
        {
            "data/a.py": "from draftsmith.data.b import X\n",
            "data/b.py": "from draftsmith.data import c\n",
            "data/c.py": "import draftsmith.data.a\n",
        },
        "import cycle: ",
    ),
    "cycle through a folder's __init__": (
        budgets.import_cycles,
        {"data/__init__.py": "from draftsmith.data.a import X\n", "data/a.py": "from draftsmith.data import Y\n"},
        "import cycle: ",
    ),
    "import inside a function": (
        budgets.local_imports,
        one_file("def f():\n    from draftsmith.errors import X\n"),
        "records.py:2 imports draftsmith.errors inside f",
    ),
    "relative import": (budgets.relative_imports, one_file("from . import errors\n"), "records.py:1 relative"),
    "bare except": (budgets.broad_excepts, one_file("try:\n    x\nexcept:\n    pass\n"), "records.py:3 broad"),
    "broad except": (
        budgets.broad_excepts,
        one_file("try:\n    x\nexcept (OSError, Exception):\n    y\n"),
        "records.py:3 broad",
    ),
    "raise only in a function that the handler defines": (
        budgets.broad_excepts,
        one_file("try:\n    x\nexcept BaseException:\n    def f():\n        raise\n"),
        "records.py:3 broad",
    ),
    "broad suppress": (
        budgets.broad_excepts,
        one_file("with contextlib.suppress(Exception):\n    x\n"),
        "records.py:1 broad suppress",
    ),
    "hasattr": (budgets.duck_typing, one_file("x = hasattr(y, 'z')\n"), "records.py:1 hasattr"),
    "getattr with a default": (budgets.duck_typing, one_file("x = getattr(y, 'z', None)\n"), "records.py:1 getattr"),
    "assert False": (budgets.dead_code, one_file("assert False, 'never'\n"), "records.py:1 condition"),
    "if 0": (budgets.dead_code, one_file("if 0:\n    x\n"), "records.py:1 condition"),
    "after a return": (budgets.dead_code, one_file("def f():\n    return 1\n    x\n"), "records.py:3 never reached"),
    "after a raise in an else": (
        budgets.dead_code,
        one_file("if x:\n    y\nelse:\n    raise z\n    y\n"),
        "records.py:5 never reached",
    ),
    "open end": (budgets.open_ends, one_file("x = 1  # " + "TO" + "DO later\n"), "records.py:1 TODO"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule_sees(name: str, tmp_path: Path) -> None:
    rule, files, expected = BROKEN[name]
    found = complaints(rule, tmp_path, files)
    assert len(found) == 1
    assert expected in found[0]


KEPT: dict[str, tuple[Rule, dict[str, str]]] = {
    "60-line function": (budgets.long_functions, one_file(function_of(60))),
    "400-line file": (budgets.long_files, one_file("x = 1\n" * 400)),
    "7 parameters besides self": (
        budgets.many_parameters,
        one_file("class C:\n    def f(self, a, b, c, d, e, f, *, g): ...\n"),
    ),
    "every downward step": (
        budgets.upward_imports,
        {
            "__main__.py": "from draftsmith.cli import main\n",
            "cli.py": "from draftsmith.config import X\nfrom draftsmith import __version__\n",
            "config.py": "from draftsmith.pipeline.run import X\nfrom draftsmith import records\n",
            "pipeline/run.py": "from draftsmith.pipeline.buffers import X\nfrom draftsmith.evaluate import export\n",
            "evaluate/export.py": "from draftsmith.train.step import X\nfrom draftsmith.evaluate.decode import X\n",
            "train/step.py": "from draftsmith.drafter.mask import X\nimport torch\n",
            "drafter/mask.py": "from draftsmith.records import X\nfrom draftsmith.drafter.layout import X\n",
            "records.py": "from draftsmith.errors import X\n",
            "errors.py": "",
        },
    ),
    "no cycle": (
        budgets.import_cycles,
        {
            "data/__init__.py": "from draftsmith.data.a import X\n",
            "data/a.py": "import draftsmith.data.b\n",
            "data/b.py": "",
        },
    ),
    "optional package inside a function": (budgets.local_imports, one_file("def f():\n    import wandb\n")),
    "broad except that raises": (
        budgets.broad_excepts,
        one_file("try:\n    x\nexcept BaseException as e:\n    if y:\n        raise X from e\n    raise\n"),
    ),
    "narrow except": (budgets.broad_excepts, one_file("try:\n    x\nexcept (OSError, KeyError):\n    pass\n")),
    "getattr without a default": (budgets.duck_typing, one_file("x = getattr(y, 'z')\n")),
    "endless loop": (budgets.dead_code, one_file("while True:\n    x\n")),
}


@pytest.mark.parametrize("name", KEPT)
def test_rule_lets_pass(name: str, tmp_path: Path) -> None:
    rule, files = KEPT[name]
    assert complaints(rule, tmp_path, files) == []


def test_every_rule_was_seen_red() -> None:
    assert {rule for rule, _, _ in BROKEN.values()} == set(RULES)


def test_missing_test_files_are_named(tmp_path: Path) -> None:
    complaints(
        budgets.long_files, tmp_path, {"__init__.py": "", "errors.py": "", "drafter/mask.py": "", "data/mask.py": ""}
    )
    tests = tmp_path / "tests"
    (tests / "drafter").mkdir(parents=True)
    (tests / "drafter" / "test_mask.py").touch()
    assert without_test(load(tmp_path), tests) == {"draftsmith.errors", "draftsmith.data.mask"}
