"""The shape of the house, read from the source: who imports whom, who touches private names, how long the files are."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keras_speedup"
FILES = sorted(PACKAGE.rglob("*.py"))

#: The floor on which each module stands; a module imports from its own floor and from those below.
FLOORS = (
    ("errors", "flavor"),
    ("engines", "pipeline", "precision", "heads"),
    ("plans",),
    ("report", "runtime", "distribution"),
    ("accelerator", "model", "callbacks"),
    ("diagnosis",),
    ("__init__", "__main__"),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}

#: Underscored names that are public all the same.
PUBLIC = {"_fields", "_asdict", "_replace", "_make", "_repr_html_"}
PRIVATE_ROOTS = ("keras.src", "tf_keras.src", "tensorflow.python", "jax._src", "torch._")
MAY_BE_PRIVATE = {"engines", "flavor"}


def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def dotted(path):
    """Returns a file's module, within the package, as a list of names."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(path, tree):
    """Yields, for each import of the package's own modules, the modules within the package and its line."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE.name:
                    yield alias.name.split(".")[1:], node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - (node.level - 1)]
            elif (node.module or "").split(".")[0] == PACKAGE.name:
                base = []
            else:
                continue
            named = (node.module or "").split(".") if node.module else []
            named = named if node.level else named[1:]
            for alias in node.names:
                yield [*base, *named, alias.name], node.lineno


def module_of(names):
    """Returns the longest leading part of `names` that is a module of the package, as a list of names."""
    for length in range(len(names), 0, -1):
        place = PACKAGE.joinpath(*names[:length])
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() or place.is_dir():
            return names[:length]
    return ["__init__"]


def test_every_module_has_its_floor():
    unknown = {dotted(path)[0] for path in FILES} - set(FLOOR_OF)
    assert not unknown, f"say in FLOORS where these stand: {sorted(unknown)}"


def test_imports_run_downwards():
    wrong = []
    for path, tree in trees().items():
        mine = dotted(path)[0]
        for names, line in imports(path, tree):
            other = module_of(names)[0]
            if FLOOR_OF.get(other, 0) > FLOOR_OF[mine] and mine != "__main__":
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}, which stands above {mine}")
    assert not wrong, "\n".join(wrong)


def test_no_import_comes_round_in_a_circle():
    graph = {}
    for path, tree in trees().items():
        edges = {tuple(module_of(names)) for names, _ in imports(path, tree)}
        graph[tuple(dotted(path))] = edges - {tuple(dotted(path))}
    done, stack = set(), []

    def visit(module):
        if module in stack:
            circle = stack[stack.index(module) :] + [module]
            pytest.fail("imports in a circle: " + " -> ".join(".".join(names) for names in circle))
        if module not in done:
            stack.append(module)
            for other in sorted(graph.get(module, ())):
                visit(other)
            stack.pop()
            done.add(module)

    for module in sorted(graph):
        visit(module)


def own_names():
    """Returns every name that the package itself defines: functions, classes, variables, attributes."""
    names = set(PUBLIC)
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return names


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_uses(tree, own):
    """Yields each underscored name that the package does not define, and each private module, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and is_private(name) and name not in own:
                yield name, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in modules:
                if module.startswith(PRIVATE_ROOTS):
                    yield module, node.lineno


def test_private_names_of_keras_and_its_backends_stay_in_engines_and_flavor():
    own, wrong = own_names(), []
    for path, tree in trees().items():
        if dotted(path)[0] not in MAY_BE_PRIVATE:
            wrong += [f"{path.relative_to(ROOT)}:{line} uses {name}" for name, line in private_uses(tree, own)]
    assert not wrong, "\n".join(wrong)


def lines_of_code(path):
    """Returns the number of lines that hold code: no blank line, no comment, no docstring."""
    source = path.read_text(encoding="utf-8")
    told = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.line.lstrip().startswith('"""')
        if token.type not in told and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_no_file_is_longer_than_400_lines_and_the_package_holds_under_5000_lines_of_code():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert sum(map(lines_of_code, FILES)) < 5000


def test_only_the_command_line_and_summary_print():
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees().items()
        if path.name != "__main__.py"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name != "summary"
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []
