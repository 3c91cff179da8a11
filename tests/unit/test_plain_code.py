"""Code is read once: an expression holds no more than a reader can keep in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("agent", "packaging", "benchmarks", "tests")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CHAINED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


def knots(code: str) -> Iterator[tuple[int, str]]:
    """Find expressions that a reader must solve: their line, and their kind."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.IfExp) and any(_has(part, ast.IfExp) for part in ast.iter_child_nodes(node)):
            yield node.lineno, "a conditional expression inside another one"
        if isinstance(node, ast.FormattedValue) and _has(node.value, ast.IfExp):
            yield node.lineno, "a conditional expression inside an f-string"
        if isinstance(node, ast.Compare) and node.ops[1:] and any(isinstance(one, CHAINED) for one in node.ops):
            yield node.lineno, "a chained comparison"
        if isinstance(node, COMPREHENSIONS) and _has(node, ast.NamedExpr):
            yield node.lineno, "an assignment expression inside a comprehension"


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(inner, kind) for inner in ast.walk(node))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_expression_is_hard_to_read(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in knots(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("a = b if c else d if e else f", ["a conditional expression inside another one"]),
        ("f'{a if b else c}'", ["a conditional expression inside an f-string"]),
        ("f'{a:{b if c else d}}'", ["a conditional expression inside an f-string"]),
        ("a == b != c", ["a chained comparison"]),
        ("a < b in c", ["a chained comparison"]),
        ("a is b is not None", ["a chained comparison"]),
        ("[b for a in c if (b := a)]", ["an assignment expression inside a comprehension"]),
        ("next(b for a in c if (b := a))", ["an assignment expression inside a comprehension"]),
        ("a = b if c else f'{d}'", []),
        ("0 < a <= b", []),
        ("a == b and b == c", []),
        ("if a := b: [c for c in a]", []),
    ],
)
def test_hard_code_is_found(code: str, found: list[str]) -> None:
    assert [what for _, what in knots(code)] == found
