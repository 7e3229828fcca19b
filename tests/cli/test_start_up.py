"""Commands that do not train never import torch."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            raise ImportError('torch is blocked in this test')
sys.meta_path.insert(0, Block())
"""
WITHOUT_TORCH = [
    "errors",
    "files",
    "plugins",
    "spec",
    "topology",
    "runs",
    "parallel",
    "plan",
    "loggers",
    "launch",
    "cli",
]


def run(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["ls"], ["ls", "--json"], ["train", "toy.yaml", "--dry-run"], ["schema"]],
)
def test_a_command_that_does_not_train_works_without_torch(bench, arguments):
    """Must show 6."""
    out = run(f"sys.argv = ['mgpu', *{arguments!r}]\nfrom mgpu.cli.app import main\nmain()\n", bench.folder)
    if arguments[-1] == "--dry-run":
        assert "4 = micro 1 x 4 micro batches a step" in out
        assert bench.store.list() == []
    if arguments[-1] == "--help":
        assert "mgpu" in out


def test_show_and_logs_work_without_torch(bench):
    bench.train()
    for command in ("show", "logs"):
        run(f"sys.argv = ['mgpu', '{command}', 'latest']\nfrom mgpu.cli.app import main\nmain()\n", bench.folder)
    out = run("sys.argv = ['mgpu', 'show', 'latest']\nfrom mgpu.cli.app import main\nmain()\n", bench.folder)
    assert "completed" in out
    assert "step-00000012" in out


def test_every_module_outside_the_worker_imports_without_torch(tmp_path):
    """The torch rule; mgpu.launch.spawner imports it inside `main`."""
    run(
        "import importlib, pkgutil\n"
        f"for package in {WITHOUT_TORCH!r}:\n"
        "    module = importlib.import_module(f'mgpu.{package}')\n"
        "    for found in pkgutil.walk_packages(getattr(module, '__path__', []), f'mgpu.{package}.'):\n"
        "        importlib.import_module(found.name)\n"
        "assert 'torch' not in sys.modules\n",
        tmp_path,
    )


def test_every_command_shows_an_example(tmp_path):
    for command in ("train", "resume", "ls", "show", "logs", "stop", "rm", "stacks", "schema"):
        out = run(f"sys.argv = ['mgpu', '{command}', '--help']\nfrom mgpu.cli.app import main\nmain()\n", tmp_path)
        assert f"mgpu {command}" in out.split("Example:")[1]
