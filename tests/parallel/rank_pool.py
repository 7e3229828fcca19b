"""Ranks that stay: real processes with real gloo, which run one training after another without starting anew.

`RankPool(world)` starts them; `train(run)` has all of them assemble and run the training of a run directory. A training that
fails or hangs ends the pool's processes; the next one gets new ones.
"""

import faulthandler
import json
import os
import select
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import ClassVar

SECONDS = 40


class RankFailed(Exception):
    """What the ranks raised, by rank."""


class RankPool:
    def __init__(self, world, folder):
        self.world = world
        self.folder = folder
        self.process = None
        self.attempt = 0

    def train(self, run):
        """Train `run` on all ranks; RankFailed with their tracebacks."""
        return self.call({"do": "train", "run": str(run.path)})

    def call(self, command):
        """Have every rank do a command; what each returned, rank 0 first."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(self.world)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            )  # fmt: skip
        self.attempt += 1
        self.process.stdin.write(json.dumps({**command, "attempt": self.attempt}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        answer = json.loads(line) if line else {"faults": {"all": f"no answer in {SECONDS} s"}}
        if answer["faults"]:
            self.close()
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in answer["faults"].items()))
        return answer["values"]

    def close(self):
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.communicate()
            self.process = None


def main(world):
    import torch.distributed as dist

    import mgpu.train.rank  # noqa: F401  imported once, before the ranks are forked

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = []
    for rank in range(world):
        to_rank, from_main = os.pipe()
        to_main, from_rank = os.pipe()
        if os.fork() == 0:
            serve(rank, world, port, os.fdopen(to_rank), os.fdopen(from_rank, "w"))
            os._exit(0)
        pipes.append((os.fdopen(from_main, "w"), os.fdopen(to_main)))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for line in sys.stdin:
        for out, _ in pipes:
            out.write(line)
            out.flush()
        waiting = {answers.fileno(): (rank, answers) for rank, (_, answers) in enumerate(pipes)}
        faults, values = {}, [None] * world
        while waiting:
            # Once one rank has failed, its peers wait for it in vain.
            ready, _, _ = select.select(list(waiting), [], [], 3 if faults else SECONDS)
            if not ready:
                break
            for handle in ready:
                rank, answers = waiting.pop(handle)
                text = answers.readline()
                answer = json.loads(text) if text else {"fault": "died"}
                if answer["fault"]:
                    faults[rank] = answer["fault"]
                values[rank] = answer.get("value")
        faults.update({rank: "waits" for rank, _ in waiting.values()})
        print(json.dumps({"faults": faults, "values": values}), flush=True)
    del store


def serve(rank, world, port, commands, answers):
    """Each command in a fork of its own, as a rank is: a process that has worked can fork no writer or loader safely."""
    for line in commands:
        if (child := os.fork()) == 0:
            answers.write(json.dumps(obey(json.loads(line), rank, world, port)) + "\n")
            answers.flush()
            os._exit(0)
        os.waitpid(child, 0)


def obey(command, rank, world, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fault, value = None, None
    faulthandler.dump_traceback_later(SECONDS * 0.8)
    try:
        value = DO[command["do"]](command, rank, world, port)
    except BaseException:
        fault = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized() and fault is None:
        dist.destroy_process_group()
    return {"fault": fault, "value": value}


def train(command, rank, world, port):
    training = assembled(command, rank, port)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.run_to_end()
    if training.logger is not None:
        training.logger.close("completed")
    pipeline = getattr(training.trainable, "pipeline", None)
    made = [type(schedule).__name__ for schedule in pipeline.schedules.values()] if pipeline else []
    return {"schedules": made, "stages": pipeline.own if pipeline else []}


def assembled(command, rank, port):
    from mgpu.parallel.base import StopVote
    from mgpu.plan import Plan
    from mgpu.runs import Run
    from mgpu.spec import load_spec
    from mgpu.train.assembly import Seat, assemble

    run = Run(Path(command["run"]))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.world))
    spec = load_spec(run.spec_path).spec
    return assemble(spec, Seat(run, plan, rank, command["attempt"], port, StopVote()))


class Untracked:
    """Stands in for the part of CommDebugMode that follows modules."""

    name, is_bw, activation_checkpointing = "", False, False
    module_parents_dict: ClassVar = {"": ()}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def collectives(command, rank, world, port):
    """Counts of the collectives of one step, by name."""
    from torch.distributed.tensor.debug import CommDebugMode

    training = assembled(command, rank, port)
    training.trainable.module.train()
    turn = next(iter(training.feed.turns()))
    mode = CommDebugMode()
    mode.advanced_module_tracker = Untracked()  # its own takes one forward pass and no more
    with mode:
        training.strategy.forward_backward(training.trainable, training._window(turn))
    return {str(name): count for name, count in mode.get_comm_counts().items()}


DO = {"train": train, "collectives": collectives}

if __name__ == "__main__":
    sys.path.pop(0)  # user code of the run, not its original beside this file
    main(int(sys.argv[1]))
