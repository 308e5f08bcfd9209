"""Nothing that lies in the current folder runs, whatever starts: a model's folder may come from a stranger.

`serve` is started beside such modules in tests/serve/test_serve_command.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.common.hostile import put_modules
from tests.train.job import environment
from tests.train.train_here import CONFIG, sets

ROOT = Path(__file__).parents[2]
SHORT = sets("train.steps=1", "train.eval_every=null", "checkpoint.asynchronous=true")


def test_modules_beside_a_configuration_are_run_by_no_process(tmp_path: Path) -> None:
    ran = put_modules(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    for words in (
        ("train", "run.yaml", "--nproc", "2", "--run-dir", "run", *SHORT),
        ("generate", "run", "--nproc", "2", "--tokens", "1 2", "--max-new-tokens", "1"),
    ):
        command = [sys.executable, "-m", "shardwise", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert not ran.exists(), ran.read_text()


def test_every_process_of_python_is_started_without_the_current_folder() -> None:
    starters = {}
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "sys.executable" in (text := ast.unparse(node)):
                starters[path.name, node.name] = "'-P'" in text
    assert len(starters) >= 3
    assert all(starters.values()), starters
