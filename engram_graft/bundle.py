"""The modelling code that an export ships: our own modules, each as it is, in one file that needs only torch and transformers."""

import ast
import importlib
import inspect
import sys

from engram_graft.errors import UserError

# what an exported model stands on, each after those it imports
MODULES = (
    "errors",
    "config",
    "window",
    "hashing",
    "initial",
    "codes",
    "rows",
    "layer",
    "cache",
    "context",
    "recall",
    "shards",
    "integrity",
    "remote",
)
_PACKAGE = "engram_graft"
_HEAD = '''"""{base} with an Engram memory (arXiv 2601.07372) in it: the modelling code of this directory.

Written by engram-graft from its own modules; the parts below carry their names. It needs torch, transformers and numpy, not
engram-graft. Apache-2.0.
"""
'''
_TAIL = '''

class {name}(EngramModel, {base}):
    """{base} with the memory that its config describes."""

    base_class = {base}


keep_conversions({name})
'''


def class_name(base: type) -> str:
    """The name of the class that opens an export of a model of class `base`."""
    return f"Engram{base.__name__}"


def modelling_code(base: type) -> str:
    """The source of `modeling_engram.py` for a model of class `base`.

    Raises:
        UserError: `base` is no class of transformers, so that the file could not import it.
    """
    home = base.__module__
    if not home.startswith("transformers."):
        raise UserError(
            f"{base.__name__} is no class of transformers (it is from {home}): an export could not rebuild it elsewhere; "
            "load the base with AutoModelForCausalLM and without remote code"
        )
    imports, bodies, owner = {home: {base.__name__}}, [], dict[str, str]()  # by module: the names, "" the module itself
    for module in MODULES:
        source = inspect.getsource(importlib.import_module(f"{_PACKAGE}.{module}"))
        tree, lines = ast.parse(source), source.splitlines()
        for node in tree.body:
            for name in _defined(node):
                if owner.setdefault(name, module) != module:
                    raise AssertionError(f"{owner[name]}.py and {module}.py both define {name}: one file cannot hold both")
            if _is_header(node) or isinstance(node, ast.Import | ast.ImportFrom):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(_PACKAGE):
                imports.setdefault(str(node.module), set()).update(map(ast.unparse, node.names))
            elif isinstance(node, ast.Import):
                imports.setdefault(ast.unparse(node).removeprefix("import "), set()).add("")
        body = "\n".join(lines).strip("\n")
        bodies.append(f"# ---- {module}: {(ast.get_docstring(tree) or '').splitlines()[0]}\n\n{body}\n")
    head = [_HEAD.format(base=base.__name__), *_statements(imports)]
    return "\n".join(head) + "\n\n\n" + "\n\n".join(bodies) + _TAIL.format(name=class_name(base), base=base.__name__)


def _is_header(node: ast.stmt) -> bool:
    """A module's docstring, or its block of imports for type checkers."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _statements(imports: dict[str, set[str]]) -> list[str]:
    """The import statements, the standard library's first."""
    lines = []
    for module in sorted(imports, key=lambda module: (module.split(".")[0] not in sys.stdlib_module_names, module)):
        names = sorted(imports[module] - {"", "TYPE_CHECKING"})
        lines += [f"import {module}"] * ("" in imports[module]) + [f"from {module} import {', '.join(names)}"] * bool(names)
    return lines
