"""Which line is the user's, and what a stack waits for."""

import sysconfig
import traceback
from pathlib import Path

import torch

import mgpu
from mgpu import frames
from mgpu.frames import Frame

TORCH, MGPU, STDLIB = (
    Path(torch.__file__).parent,
    Path(mgpu.__file__).parent,
    Path(sysconfig.get_path("stdlib")),
)
USER = Frame("/home/u/train.py", 3, "loss")
LOOP = Frame(f"{MGPU}/train/loop.py", 63, "run_to_end")
ALL_REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce")
FETCH = Frame(f"{TORCH}/utils/data/dataloader.py", 9, "__next__")
WAIT = Frame(f"{STDLIB}/threading.py", 9, "wait")


def test_the_place_is_the_users_innermost_line():
    assert frames.place([LOOP, USER, ALL_REDUCE]) == "/home/u/train.py:3 in loss"
    assert frames.place([USER, USER._replace(line=9), WAIT]) == "/home/u/train.py:9 in loss"
    assert frames.place([LOOP, ALL_REDUCE]) == f"{ALL_REDUCE}"
    assert frames.place([Frame(f"{MGPU}/zoo/gpt.py", 5, "forward"), LOOP]) == f"{MGPU}/zoo/gpt.py:5 in forward"
    assert frames.place([]) == ""


def test_only_the_innermost_call_tells_a_collective():
    assert frames.is_in_collective([USER, ALL_REDUCE])
    assert frames.is_in_collective(
        [USER, Frame(f"{TORCH}/autograd/graph.py", 1, "run"), Frame(f"{TORCH}/_ops.py", 1, "f")]
    )
    assert not frames.is_in_collective([ALL_REDUCE, USER])
    linear = Frame(f"{TORCH}/nn/modules/linear.py", 1, "forward")
    assert not frames.is_in_collective([USER, Frame(f"{TORCH}/nn/parallel/distributed.py", 1, "forward"), linear])
    assert frames.is_in_loader([USER, FETCH, WAIT])
    assert not frames.is_in_loader([USER, ALL_REDUCE])


def test_tracebacks_and_faulthandler_read_alike():
    try:
        torch.nn.Linear(2, 2)(torch.zeros(3))
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    found = frames.parse(text)
    assert found[0].file == __file__
    assert found[0].function == "test_tracebacks_and_faulthandler_read_alike"
    assert frames.place(found).startswith(f"{__file__}:")
    written = f'Current thread 0x1 (most recent call first):\n  File "{USER.file}", line 3 in loss\n'
    assert frames.parse(written) == [USER]
