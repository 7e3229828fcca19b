"""Models of torchvision and timm by `target` alone, in the environment of `make test-models`."""

import pytest
from shop import assert_same, make_workshop  # noqa: F401

IMAGES = {"target": "stack.py:Images", "args": {"size": 64}}
SMALL = {"target": "stack.py:Images", "args": {"size": 32}}
VIT = {"image_size": 32, "patch_size": 16, "num_layers": 4, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
TIMM_VIT = {"model_name": "vit_tiny_patch16_224", "img_size": 32, "depth": 4}
MODELS = {
    "resnet50": ("torchvision.models:resnet50", {"width_per_group": 8}, "layer3", IMAGES),
    "vit": ("torchvision.models:VisionTransformer", VIT, "encoder.layers.encoder_layer_2", SMALL),
    "timm-vit": ("timm:create_model", TIMM_VIT, "blocks.2", SMALL),
    "timm-mobilenet": ("timm:create_model", {"model_name": "mobilenetv3_small_050"}, "blocks.3", IMAGES),
}
STRATEGIES = ("ddp", "fsdp", "pipeline")
LAYOUTS = [(name, strategy) for name in MODELS for strategy in STRATEGIES]


def settings_of(target, args, images):
    return {
        "model": {"target": target, "args": {**args, "num_classes": 4}},
        "data": {"train": images, "eval": {**images, "args": {**images["args"], "n": 5}}},
        "task": "stack.py:Classes",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.01, "momentum": 0.9}},
    }


@pytest.mark.parametrize("name, strategy", [*LAYOUTS, ("vit", "tensor"), ("vit", "hybrid")])
def test_a_vision_model_trains_as_in_one_process(workshop, name, strategy):
    """Five steps in double precision: losses, weights and running statistics."""
    world = 4 if strategy == "hybrid" else 2
    target, args, cut, images = MODELS[name]
    settings = {**settings_of(target, args, images), "precision": "fp64"}
    options = {"pipeline": {"split": [cut]}, "hybrid": {"shard": 2, "tensor": 2}}.get(strategy, {})
    trained = workshop.train(world, parallel={"strategy": strategy, **options}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)
    if name == "resnet50":
        assert int(trained.weights["model.bn1.num_batches_tracked"]) == 4 + 4 + 3 + 4 + 4


def test_the_attention_of_a_vision_transformer_is_split(workshop):
    """Its four heads over four ranks: a sum of each block's attention and one of its MLP, forward and backward."""
    target, args, _, images = MODELS["vit"]
    blocks, micro_batches = VIT["num_layers"], 4
    issued = workshop.collectives(4, parallel={"strategy": "tensor"}, **settings_of(target, args, images))
    assert issued["c10d_functional.all_reduce"] == (2 + 2) * blocks * micro_batches


def test_a_vision_transformer_goes_on_from_and_to_one_process(workshop):
    target, args, _, images = MODELS["vit"]
    settings = {**settings_of(target, args, images), "precision": "fp64"}
    whole, four = {"parallel": {"strategy": "single"}}, {"parallel": {"strategy": "tensor"}}
    for first, second in ((four, whole), (whole, four)):
        worlds = [4 if layout is four else 1 for layout in (first, second)]
        run = workshop.train(worlds[0], duration="3 steps", **first, **settings).run
        trained = workshop.resume(run, worlds[1], duration="5 steps", **second)
        assert_same(trained, workshop.single(**settings), 1e-9, evaluations=False)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "tensor"])
def test_vit_b_16_itself(workshop, strategy):
    """All of its 86 million parameters, on small images, for three steps."""
    settings = {**settings_of("torchvision.models:vit_b_16", {"image_size": 32}, SMALL), "duration": "3 steps"}
    options = {"split": ["encoder.layers.encoder_layer_6"]} if strategy == "pipeline" else {}
    trained = workshop.train(2, parallel={"strategy": strategy, **options}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-5)
