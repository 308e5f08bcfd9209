"""SECURITY.md: the tests that it names exist, and the source has no call that runs what a file or a peer says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"

#: Calls that can run code: the last name, or the last two.
UNSAFE = {
    *("eval", "exec", "__import__", "pickle.load", "pickle.loads", "torch.load", "yaml.load", "yaml.unsafe_load"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"),
    *("marshal.loads", "os.system", "os.popen", "cloudpickle.loads", "loader.exec_module"),
}
#: Where one is right all the same: the file, the call and why.
ALLOWED = {
    (
        "integrations/fabric.py",
        "torch.load",
    ): "checkpoints of Fabric, which passes weights_only on; torch's own default is True",
    ("integrations/transformers.py", "torch.load"): "weights_only=True",
    ("launch/function.py", "cloudpickle.loads"): "between processes of one call of sw.launch or sw.train",
    ("train/spec.py", "loader.exec_module"): "a spec, which the user names and has written",
    ("testing/oracle.py", "all_gather_object"): "between ranks that a test has started",
    ("testing/ranks.py", "pickle.loads"): "from processes that this one has started",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            *_, owner, name = ["", *ast.unparse(node.func).split(".")]
            is_bare = not owner or name.endswith(("object", "object_list"))
            yield name if is_bare else f"{owner}.{name}", node


def test_nothing_in_the_source_runs_what_a_file_or_a_peer_says() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for call, node in calls(ast.parse(path.read_text())):
            if call in UNSAFE:
                found.add((name, call))
            shell = [word for word in node.keywords if word.arg == "shell" and ast.unparse(word.value) != "False"]
            assert not shell, f"{name}:{node.lineno} starts a shell"
            unsafe = [word for word in node.keywords if word.arg in {"allow_pickle", "trust_remote_code"}]
            assert all(ast.unparse(word.value) == "False" for word in unsafe), f"{name}:{node.lineno}"
    assert found == set(ALLOWED)


def test_the_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for path, test in named:
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
