"""Models that nobody here wrote, by `target` alone."""

from typing import ClassVar

import pytest
from rank_pool import RankFailed
from shop import assert_same, make_workshop  # noqa: F401

from mgpu.errors import PlanError
from mgpu.parallel._tensor_plans import TensorSplit

LLAMA = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    **LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "GPT2": {
        "vocab_size": 32, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "Llama": LLAMA,
    "Qwen3": {**LLAMA, "head_dim": 8},  # norms of queries and keys, on each tensor peer's own heads
    "T5": {
        "vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "pad_token_id": 0, "decoder_start_token_id": 0,
    },
    "Phi3": LLAMA,  # fused matrices, whose outputs are cut after they were gathered
    "Mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "DeepseekV2": {**LATENT, "topk_method": "greedy", "q_lora_rank": 8},
    "DeepseekV3": {**LATENT, "n_group": 2, "topk_group": 1},
    "GraniteSWA": {**LLAMA, "sliding_window": 4},
}  # fmt: skip
MODELS = {
    "GPT2": ("GPT2LMHeadModel", "transformer.h.2"),
    "T5": ("T5ForConditionalGeneration", "decoder.block.0"),
    **{name: (f"{name}ForCausalLM", "model.layers.2") for name in CONFIGS if name not in ("GPT2", "T5")},
}
EXPERTS = ("Mixtral", "Qwen3Moe", "DeepseekV2", "DeepseekV3")
LAYOUTS = [(strategy, name) for strategy in ("ddp", "fsdp", "pipeline", "tensor") for name in ("GPT2", "Llama")]


def settings_of(name):
    config = {"target": f"transformers:{name}Config", "args": CONFIGS[name]}
    return {
        "model": {"target": f"transformers:{MODELS[name][0]}", "args": {"config": config}},
        "optimizer__args": {"lr": 1e-3},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, name", [*LAYOUTS, *(("tensor", name) for name in ("Qwen3", "Phi3", "GraniteSWA", *EXPERTS))]
)
def test_a_transformers_model_trains_as_in_one_process(workshop, name, strategy):
    settings = settings_of(name)
    options = {"split": [MODELS[name][1]]} if strategy == "pipeline" else {}
    trained = workshop.train(2, parallel={"strategy": strategy, **options}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-5)


@pytest.mark.slow
def test_two_matrices_in_one_are_split_apart(workshop):
    """In place of being gathered, as Phi-3's own plan has it; sharded too, and from a checkpoint of one process."""
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan = {
        f"{attention}.qkv_proj": "colwise_gather", f"{attention}.o_proj": "rowwise_split",
        f"{mlp}.gate_up_proj": "packed_colwise", f"{mlp}.down_proj": "rowwise",
    }  # fmt: skip
    settings = settings_of("Phi3")
    parallel = {"strategy": "hybrid", "shard": 2, "tensor": 2, "plan": plan}
    assert_same(workshop.train(4, parallel=parallel, **settings), workshop.single(**settings), 1e-5)
    run = workshop.train(1, parallel={"strategy": "single"}, duration="3 steps", **settings).run
    trained = workshop.resume(run, 2, parallel={"strategy": "tensor", "plan": plan}, duration="5 steps")
    assert_same(trained, workshop.single(**settings), 1e-5, evaluations=False)


@pytest.mark.slow
def test_experts_go_on_from_and_to_one_process(workshop):
    """Stacked matrices of experts, split inside and sharded by expert."""
    settings = settings_of("Mixtral")
    parallel = {"strategy": "hybrid", "shard": 2, "tensor": 2}
    for first, second in (((4, parallel), None), (None, (4, parallel))):
        start, end = (where or (1, {"strategy": "single"}) for where in (first, second))
        run = workshop.train(start[0], parallel=start[1], duration="3 steps", **settings).run
        trained = workshop.resume(run, end[0], parallel=end[1], duration="5 steps")
        assert_same(trained, workshop.single(**settings), 1e-5, evaluations=False)


def test_a_style_that_is_not_ours_is_refused():
    from torch import nn

    class Carrying(nn.Linear):
        _tp_plan: ClassVar = {"experts": "moe_identity_expert"}

    with pytest.raises(PlanError, match="the model's own plan uses moe_identity_expert, which is not supported"):
        TensorSplit().check(Carrying(2, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, schedule, split", [
    (2, "1f1b", ["decoder.block.0"]), (2, "zbv", ["encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    (4, "gpipe", "auto"),
])  # fmt: skip
def test_an_encoder_and_a_decoder_of_transformers_in_stages(workshop, ranks, schedule, split):
    """T5: all blocks take the bias of their first one, those of the decoder also what the encoder made."""
    data = {"train": "stack.py:Pairs", "eval": {"target": "stack.py:Pairs", "args": {"n": 7}}}
    settings = {**settings_of("T5"), "data": data, "precision": "fp64"}
    parallel = {"strategy": "pipeline", "schedule": schedule, "split": split}
    assert_same(workshop.train(ranks, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.slow
def test_the_loss_on_logits_that_stay_split(workshop):
    """Of GPT-2's layers whose outputs are gathered, only the head's stay split."""
    settings = settings_of("GPT2")
    trained = workshop.train(2, parallel={"strategy": "tensor", "loss_parallel": True}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-5)


@pytest.mark.slow
def test_a_plan_that_forgets_what_works_on_a_part_of_the_heads_is_told(workshop):
    """Each peer would train the norms of its own heads, and none would say so."""
    attention = "model.layers.*.self_attn"
    plan = {f"{attention}.{name}_proj": "colwise" for name in "qkv"} | {f"{attention}.o_proj": "rowwise"}
    with pytest.raises(RankFailed, match=r"gradient of model\.layers\.0\.self_attn\.[qk]_norm\.weight is not the same"):
        workshop.train(2, parallel={"strategy": "tensor", "plan": plan}, **settings_of("Qwen3"))
    plan |= {f"{attention}.[qk]_norm": "replicated"}
    trained = workshop.train(2, parallel={"strategy": "tensor", "plan": plan}, **settings_of("Qwen3"))
    assert_same(trained, workshop.single(**settings_of("Qwen3")), 1e-5)
