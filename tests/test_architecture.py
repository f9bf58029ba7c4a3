"""Who may import whom, what stays light, and what is banned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("valuspec", "retrieval", "deployments", "jobs")
THIRD_PARTY = {"ray", "fastapi", "starlette", "pydantic", "redis", "faiss", "transformers"}

#: What each package may import of ours, and of the libraries that mark a layer.
ALLOWED = {
    "valuspec": {"valuspec", "transformers"},
    "retrieval": {"retrieval", "valuspec", "redis", "faiss"},
    "deployments": {"deployments", "retrieval", "valuspec"} | THIRD_PARTY - {"redis", "faiss"},
    "jobs": {"jobs", "retrieval", "valuspec", "ray", "pydantic"},
}
#: Modules that may import transformers.
TRANSFORMERS_ONLY_IN = ROOT / "valuspec" / "engine"
#: What retrieval may know of valuspec: data, not the engine.
RETRIEVAL_SEES = {"valuspec.tree", "valuspec.errors", "valuspec.cost"}
#: Deserialisers that run code, wherever the bytes come from.
BANNED = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def modules(package: str) -> Iterator[Path]:
    return (ROOT / package).rglob("*.py")


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a module imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def violations(package: str, allowed: set[str]) -> list[str]:
    watched = set(PACKAGES) | THIRD_PARTY
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in watched - allowed
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_their_layer_may(package) -> None:
    assert violations(package, ALLOWED[package]) == []


def test_the_rule_can_fail() -> None:
    assert violations("deployments", {"deployments"}) != []


def test_transformers_stays_in_the_engine() -> None:
    users = {
        path
        for package in PACKAGES
        for path in modules(package)
        if any(name.partition(".")[0] == "transformers" for name in imports(path))
    }
    assert users
    assert all(TRANSFORMERS_ONLY_IN in path.parents for path in users), users


def test_retrieval_sees_types_of_valuspec_only() -> None:
    seen = {
        name
        for path in modules("retrieval")
        for name in imports(path)
        if name.startswith("valuspec")
    }
    assert seen <= RETRIEVAL_SEES


@pytest.mark.parametrize("package", [*PACKAGES, "bench"])
def test_nothing_deserialises_code(package) -> None:
    for path in modules(package):
        assert not BANNED & {name.partition(".")[0] for name in imports(path)}, path
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert not {ast.unparse(n.func) for n in calls} & {"eval", "exec"}, path
        for call in calls:
            keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert not keywords.keys() & {"allow_pickle", "trust_remote_code"}, path
            if ast.unparse(call.func) == "torch.load":
                assert keywords.get("weights_only") == "True", path


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("valuspec", {"torch", "ray", "redis", "faiss", "transformers", "numba", "pydantic"}),
        ("valuspec.engine.types", {"torch", "ray", "redis", "faiss", "transformers"}),
        ("retrieval.namespace", {"torch", "ray", "faiss", "transformers"}),
        ("deployments.cli", {"torch", "ray", "redis", "faiss", "transformers", "fastapi"}),
        ("deployments.commands.chat", {"torch", "ray", "redis", "faiss", "fastapi"}),
        ("deployments.app", {"torch", "faiss", "transformers"}),
    ],
)
def test_importing_stays_light(module, heavy) -> None:
    """In a process of its own: this one has loaded everything."""
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not heavy & set(done.stdout.split())
