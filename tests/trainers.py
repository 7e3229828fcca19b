"""A checkpointer of one rank in this process, as a training would have it."""

import torch
from torch import nn

from mgpu.checkpoint import CheckpointFolder, Retention
from mgpu.checkpoint.checkpointer import Checkpointer
from mgpu.checkpoint.publish import Publisher
from mgpu.checkpoint.state import TrainingState
from mgpu.files import append_line, read_lines

CPU = torch.device("cpu")


class Trainer:
    """A small model and AdamW, saved by a checkpointer of its own."""

    def __init__(self, path, keep=3, model=None, optimizer=None, best=None):
        torch.manual_seed(0)
        self.folder = CheckpointFolder(path)
        self.log = path.parent / f"{path.name}.jsonl"
        publisher = Publisher(self.folder, Retention(keep, best), self.record)
        self.checkpointer = Checkpointer(publisher, rank=0, world=1, token="1")
        self.model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = optimizer or torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainingState(self.model, self.optimizer)
        self.step = 0

    def record(self, kind, /, **values):
        """Events go to a file: the writer is another process."""
        append_line(self.log, {"event": kind, **values})

    @property
    def events(self):
        return list(read_lines(self.log))

    def train(self, steps=1):
        for _ in range(steps):
            self.model(torch.randn(5, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def save(self, wait=True, **metrics):
        self.checkpointer.save(
            self.step,
            self.state.gather(),
            device=CPU,
            data={"scaler": None},
            position={"step": self.step, "epoch": 0, "offset": 4 * self.step},
            metrics=metrics,
        )
        return self.checkpointer.wait() if wait else None

    def tensors(self):
        """Every tensor of the training, by path, copied."""
        return {path: tensor.clone() for path, tensor in self.state.gather().tensors.items()}
