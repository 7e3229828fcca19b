"""Gradients made smaller for the way between ranks: DDP's communication hooks, and PowerSGD's state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel


def compress(ddp: DistributedDataParallel, how: str, rank: int, start: int) -> Any:
    """Have `ddp` reduce gradients by `how`: fp16, bf16 or powersgd (of `rank`, from step `start`); PowerSGD's state."""
    import torch

    if how in ("fp16", "bf16"):
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[how]
        # DDP checks a hook's annotations against objects, and ours are texts.
        ddp.register_comm_hook(kind, lambda kind, bucket: reduce_narrow(kind, bucket))  # noqa: PLW0108
        return None
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    ddp.register_comm_hook(state, powerSGD_hook if ddp.device.type == "cuda" else _one_after_another(powerSGD_hook))
    return state


def _one_after_another(hook: Any) -> Any:
    """A hook of several collectives a bucket: gloo takes those of two buckets in whatever order they come, on each rank."""
    before: list[Any] = []

    def in_turn(state: Any, bucket: Any) -> Any:
        for future in before:
            future.wait()
        before[:] = [hook(state, bucket)]
        return before[0]

    return lambda state, bucket: in_turn(state, bucket)  # noqa: PLW0108 - DDP checks annotations, and ours are texts


def reduce_narrow(kind: torch.dtype, bucket: Any) -> Any:
    """Average a bucket in 16 bits: divided before it is summed, so that the sum stays in range.

    torch's own hook for bf16 asks for NCCL; gloo sums bf16 just as well.
    """
    import torch.distributed as dist

    narrow = bucket.buffer().div(dist.get_world_size()).to(kind)
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None

    def widen(done: Any) -> Tensor:
        buffer: Tensor = bucket.buffer()
        return buffer.copy_(done.value()[0])

    return work.get_future().then(widen)


def powersgd_tensors(state: Any, world: int) -> dict[str, Tensor]:
    """What PowerSGD must find again to go on as if it had never stopped; the errors it carries differ by rank."""
    import torch

    _, keys, position, has_gauss, gauss = state.rng.get_state()
    tensors = {
        "counts": torch.tensor([world, state.iter, position, has_gauss], dtype=torch.int64),
        "gauss": torch.tensor([gauss], dtype=torch.float64),
        "keys": torch.from_numpy(keys.astype("int64")),
    }
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        tensors.update({f"{name}.{bucket}": value for bucket, value in getattr(state, name).items()})
    return tensors


def load_powersgd(state: Any, tensors: Mapping[str, Tensor], world: int, device: torch.device) -> None:
    """Restore `state`; where the number of ranks has changed, its errors have no owner and it begins afresh."""
    if not tensors or int(tensors["counts"][0]) != world:
        return
    _, state.iter, position, has_gauss = map(int, tensors["counts"])
    keys = tensors["keys"].numpy().astype("uint32")
    state.rng.set_state(("MT19937", keys, position, has_gauss, float(tensors["gauss"][0])))
    for name, value in tensors.items():
        kind, _, bucket = name.partition(".")
        if bucket:
            getattr(state, kind)[int(bucket)] = value.to(device)
