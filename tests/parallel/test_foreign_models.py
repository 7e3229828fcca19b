"""Models that nobody here wrote, by `target` alone."""

import pytest
from shop import assert_same, make_workshop  # noqa: F401

CONFIGS = {
    "GPT2": {
        "vocab_size": 32, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
    },
    "Llama": {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "use_cache": False,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip
MODELS = {"GPT2": ("GPT2LMHeadModel", "transformer.h.2"), "Llama": ("LlamaForCausalLM", "model.layers.2")}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "tensor"])
def test_a_transformers_model_trains_as_in_one_process(workshop, name, strategy):
    kind, cut = MODELS[name]
    config = {"target": f"transformers:{name}Config", "args": CONFIGS[name]}
    settings = {
        "model": {"target": f"transformers:{kind}", "args": {"config": config}},
        "optimizer__args": {"lr": 1e-3},
    }
    options = {"pipeline": {"split": [cut]}}.get(strategy, {})
    if (name, strategy) == ("GPT2", "tensor"):  # it carries no plan, and its layers are no nn.Linear
        options = {"plan": {"lm_head": "colwise_gather", "transformer.wte": "table"}}
    trained = workshop.train(2, parallel={"strategy": strategy, **options}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-5)
