"""A folder with a spec and user code, one pool of ranks for each number of them, and trainings to compare."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import metrics_of, weights_of
from rank_pool import RankPool

from mgpu.plan import make_plan
from mgpu.runs import RunStore
from mgpu.spec import load_spec
from mgpu.topology import Topology

USER_FILES = ("stack.py", "attentive.py", "branching.py", "habits.py")
SPEC = """\
model: {target: stack.py:gpt, args: {}}
data:
  train: {target: stack.py:Tokens, args: {}}
  eval: {target: stack.py:Tokens, args: {n: 7}}
task: stack.py:NextToken
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-2}}
batch: {size: 8, micro: 2}
duration: 5 steps
clip_norm: 0.5
devices: cpu:1
parallel: {strategy: single}
"""


POINTS = {
    "data": {"train": "stack.py:Points", "eval": {"target": "stack.py:Points", "args": {"n": 7}}}, "task": "stack.py:Square",
}  # fmt: skip


class Trained:
    """What is compared: losses and gradient norms a step, the evaluation, all tensors, the ids that were read."""

    def __init__(self, run, told=()):
        self.run = run
        self.told = told
        self.plan = json.loads(run.plan_path.read_text())
        self.rows = metrics_of(run)
        self.losses = [row["loss"] for row in self.rows]
        self.norms = [row["grad_norm"] for row in self.rows]
        self.weights = weights_of(run)
        self.notes = [event["text"] for event in run.events() if event["event"] == "note"]
        self.evaluations = [event["loss"] for event in run.events() if event["event"] == "evaluated"]


class Workshop:
    def __init__(self, folder):
        self.folder = folder
        for name in (*USER_FILES, "acme_strategy.py"):
            shutil.copy(Path(__file__).with_name(name), folder)
        package = folder / "acme_strategy-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-strategy\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text("[mgpu.parallel]\nacme = acme_strategy:Acme\n")
        sys.path.insert(0, str(folder))
        (folder / "spec.yaml").write_text(SPEC)
        self.pools = {}
        self.known = {}

    def run(self, world, **settings):
        """A run that is laid out and not started; dots in a setting's name as double underscores."""
        settings = {"devices": f"cpu:{world}", **settings}
        values = {
            name: re.sub(rf'"({"|".join(USER_FILES)}):', rf'"{self.folder}/\1:', json.dumps(value))
            for name, value in settings.items()
        }
        sets = [f"{name.replace('__', '.')}={value}" for name, value in values.items()]
        loaded = load_spec(self.folder / "spec.yaml", sets)
        plan = make_plan(loaded.spec, Topology.detect())
        return RunStore(self.folder / "runs").create(
            "t", loaded.dump(), plan.to_json(), [], spec_source="spec.yaml"
        ), plan.world

    def train(self, world, **settings):
        run, ranks = self.run(world, **settings)
        return Trained(run, self.pool(ranks).train(run))

    def collectives(self, world, **settings):
        """How many collectives of each name rank 0 issues in one step."""
        run, ranks = self.run(world, **settings)
        return self.pool(ranks).call({"do": "collectives", "run": str(run.path)})[0]

    def resume(self, run, world, **settings):
        """Train `run` on from its newest checkpoint, laid out anew."""
        sets = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
        loaded = load_spec(run.spec_path, [f"devices=cpu:{world}", *sets])
        plan = make_plan(loaded.spec, Topology.detect())
        run.spec_path.write_text(loaded.dump())
        run.plan_path.write_text(json.dumps(plan.to_json()))
        self.pool(plan.world).train(run)
        return Trained(run)

    def single(self, **settings):
        """What one process makes of the same spec; worked out once."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self.known:
            self.known[key] = self.train(1, parallel={"strategy": "single"}, **settings)
        return self.known[key]

    def pool(self, ranks):
        return self.pools.setdefault(ranks, RankPool(ranks, self.folder))

    def replicas(self, world, parallel):
        """World size and number of replicas of a layout."""
        from mgpu.plan import make_strategy

        loaded = load_spec(self.folder / "spec.yaml", [f"parallel={json.dumps(parallel)}"])
        strategy = make_strategy(loaded.spec)
        ranks = strategy.processes(world)
        return ranks, strategy.replicas(ranks)


def assert_same(trained, expected, tolerance, evaluations=True):
    """Losses, norms, evaluation and every tensor agree to `tolerance`, relative to the largest value of each."""
    assert trained.losses == pytest.approx(expected.losses, rel=tolerance)
    assert trained.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    if evaluations:
        assert trained.evaluations == pytest.approx(expected.evaluations, rel=10 * tolerance)
    assert sorted(trained.weights) == sorted(expected.weights)
    for name, value in expected.weights.items():
        scale = max(1.0, float(value.double().abs().max()) if value.numel() else 1.0)
        torch.testing.assert_close(
            trained.weights[name].double(), value.double(), atol=10 * tolerance * scale, rtol=0, msg=name
        )


@pytest.fixture(scope="module", name="workshop")
def make_workshop(tmp_path_factory):
    """The workshop that the strategies of a test module are tried in."""
    shop = Workshop(tmp_path_factory.mktemp("strategies"))
    yield shop
    sys.path.remove(str(shop.folder))
    for pool in shop.pools.values():
        pool.close()
