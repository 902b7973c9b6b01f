"""The rules that `test_budgets.py` holds src to: budgets, import directions, and a few forbidden constructs.

Each rule is a function from the parsed modules to a list of complaints ("file:line what").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

PACKAGE = "draftsmith"

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_PARAMETERS = 7

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli", "api"}),
    frozenset({"config"}),
    frozenset({"pipeline.run"}),
    frozenset({"evaluate", "report", "plan", "pipeline"}),
    frozenset({"train"}),
    frozenset({"data", "target", "drafter"}),
    frozenset({"records"}),
    frozenset({"errors"}),
    frozenset({PACKAGE}),
)
"""Parts from the top down: a part imports itself and lower layers, not its neighbours in a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One parsed source file."""

    name: str
    """Dotted, a package's `__init__` under the package's own name."""
    place: str
    """Path below the source folder, for complaints."""
    text: str
    tree: ast.Module

    def complain(self, node: ast.stmt | ast.expr | ast.excepthandler, what: str) -> str:
        return f"{self.place}:{node.lineno} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of a module of the package by another."""

    target: str
    node: ast.Import | ast.ImportFrom


Modules = dict[str, Module]
Rule = Callable[[Modules], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def load(source: Path) -> Modules:
    """Parse every file of the package below `source`."""
    modules: Modules = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name=name, place=str(path.relative_to(source)), text=text, tree=ast.parse(text))
    return modules


def nodes(modules: Modules) -> Iterator[tuple[Module, ast.AST]]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            yield module, node


def functions(modules: Modules) -> Iterator[tuple[Module, Function]]:
    for module, node in nodes(modules):
        if isinstance(node, Function):
            yield module, node


def walk_own(root: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without entering functions defined inside."""
    for child in ast.iter_child_nodes(root):
        yield child
        if not isinstance(child, Function | ast.Lambda):
            yield from walk_own(child)


def called(node: ast.AST) -> str:
    """Name of the function or method that `node` calls, "" where it isn't a call by name."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_broad(kind: ast.expr | None) -> bool:
    """Whether an `except` (or `suppress`) of this class catches nearly everything."""
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(is_broad(element) for element in kind.elts)
    name = kind.attr if isinstance(kind, ast.Attribute) else kind.id if isinstance(kind, ast.Name) else ""
    return name in {"Exception", "BaseException"}


def imports(module: Module, modules: Modules, *, root: ast.AST | None = None) -> Iterator[Import]:
    """Imports of the package's own modules in `module` (or below `root`), each resolved to the module that it names."""
    for node in ast.walk(root or module.tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            named = [name if name in modules else base for name in inner]
        else:
            continue
        for target in named:
            if target.split(".")[0] == PACKAGE:
                yield Import(target=target, node=node)


def part(name: str) -> str:
    """The part of the package that a module belongs to: its file or folder at the top, or `pipeline.run`."""
    inner = name.split(".")[1:]
    if inner[:2] == ["pipeline", "run"]:
        return "pipeline.run"
    return inner[0] if inner else PACKAGE


def layer(name: str) -> int | None:
    """Place of the module's part in `LAYERS`, counted from the top; None where it has none."""
    return next((place for place, parts in enumerate(LAYERS) if part(name) in parts), None)


def long_functions(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, node in functions(modules):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            found.append(module.complain(node, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"))
    return found


def long_files(modules: Modules) -> list[str]:
    lines = {module.place: len(module.text.splitlines()) for module in modules.values()}
    return [f"{place}:1 {n} lines, at most {MAX_FILE_LINES}" for place, n in lines.items() if n > MAX_FILE_LINES]


def many_parameters(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, node in functions(modules):
        positional = [*node.args.posonlyargs, *node.args.args]
        is_method = bool(positional) and positional[0].arg in {"self", "cls"}
        rest = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        count = len(positional) - is_method + len(node.args.kwonlyargs) + len(rest)
        if count > MAX_PARAMETERS:
            found.append(module.complain(node, f"{node.name} has {count} parameters, at most {MAX_PARAMETERS}"))
    return found


def upward_imports(modules: Modules) -> list[str]:
    found: list[str] = []
    for module in modules.values():
        mine = layer(module.name)
        if mine is None:
            found.append(f"{module.place}:1 '{part(module.name)}' has no place in LAYERS")
            continue
        for each in imports(module, modules):
            theirs = layer(each.target)
            if part(each.target) != part(module.name) and (theirs is None or theirs <= mine):
                found.append(module.complain(each.node, f"imports {each.target}, which is not below it"))
    return found


def import_cycles(modules: Modules) -> list[str]:
    graph = {name: {each.target for each in imports(module, modules)} for name, module in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["import cycle: " + " -> ".join(reversed(error.args[1]))]
    return []


def local_imports(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, function in functions(modules):
        for each in imports(module, modules, root=function):
            found.append(module.complain(each.node, f"imports {each.target} inside {function.name}"))
    return found


def relative_imports(modules: Modules) -> list[str]:
    return [
        module.complain(node, "relative import")
        for module, node in nodes(modules)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def broad_excepts(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, node in nodes(modules):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
            if not any(isinstance(inner, ast.Raise) for inner in walk_own(node)):
                found.append(module.complain(node, "broad except that doesn't raise again"))
        elif isinstance(node, ast.Call) and called(node) == "suppress" and any(map(is_broad, node.args)):
            found.append(module.complain(node, "broad suppress"))
    return found


def duck_typing(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, node in nodes(modules):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            found.append(module.complain(node, "hasattr"))
        elif isinstance(node, ast.Call) and called(node) == "getattr" and len(node.args) > 2:
            found.append(module.complain(node, "getattr with a default"))
    return found


def dead_code(modules: Modules) -> list[str]:
    found: list[str] = []
    for module, node in nodes(modules):
        if isinstance(node, ast.Assert | ast.If | ast.While) and isinstance(node.test, ast.Constant):
            is_endless_loop = isinstance(node, ast.While) and bool(node.test.value)
            found += [] if is_endless_loop else [module.complain(node, "condition is a constant")]
        for block in blocks(node):
            for statement, after in pairwise(block):
                if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
                    found.append(module.complain(after, "never reached"))
    return found


def blocks(node: ast.AST) -> Iterable[list[ast.stmt]]:
    """The lists of statements that `node` holds."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def open_ends(modules: Modules) -> list[str]:
    marker = re.compile(r"\b(TODO|FIXME|XXX)\b")
    return [
        f"{module.place}:{number} {match.group()}"
        for module in modules.values()
        for number, line in enumerate(module.text.splitlines(), start=1)
        if (match := marker.search(line))
    ]


def without_test(modules: Modules, tests: Path) -> set[str]:
    """Modules, `__init__` and `__main__` aside, that have no `tests/<folder>/test_<module>.py`."""
    missing: set[str] = set()
    for module in modules.values():
        path = Path(module.place).relative_to(PACKAGE)
        if path.stem not in {"__init__", "__main__"} and not (tests / path.with_name(f"test_{path.name}")).is_file():
            missing.add(module.name)
    return missing


RULES: tuple[Rule, ...] = (
    long_functions,
    long_files,
    many_parameters,
    upward_imports,
    import_cycles,
    local_imports,
    relative_imports,
    broad_excepts,
    duck_typing,
    dead_code,
    open_ends,
)
