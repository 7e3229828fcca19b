"""GPT: what it may see, how it starts, what it writes."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu.zoo import GPT
from mgpu.zoo.gpt import Attention, Layer


def make(seed=0, **how):
    torch.manual_seed(seed)
    return GPT(**{"layers": 2, "width": 32, "context": 16, "heads": 4, "vocabulary": 50, **how})


def tokens(shape, vocabulary=50, seed=1):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def test_logits_have_one_row_a_token():
    assert make()(tokens((3, 7))).shape == (3, 7, 50)


def test_a_token_is_not_seen_by_those_before_it():
    model = make()
    before = tokens((2, 16))
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 50
    first, second = model(before), model(after)
    assert torch.equal(first[:, :9], second[:, :9])
    assert (first[:, 9:] != second[:, 9:]).any(-1).all()


def test_samples_of_a_batch_do_not_meet():
    model = make()
    batch = tokens((4, 16))
    torch.testing.assert_close(model(batch)[2:3], model(batch[2:3]))


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="17 tokens are more than the context of 16"):
        make()(tokens((1, 17)))


def test_a_parameter_count_by_hand():
    # Embeddings 50*32 + 16*32; a layer: 4*32*32 attention, 2*32*128 mlp, 4*32 norms; the last norm 2*32; tied head.
    count = 50 * 32 + 16 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 128 + 4 * 32) + 2 * 32
    assert sum(parameter.numel() for parameter in make().parameters()) == count
    assert sum(parameter.numel() for parameter in make(tie=False).parameters()) == count + 50 * 32


def test_tied_weights_are_one_tensor_and_untied_are_not():
    tied, free = make(), make(tie=False)
    assert tied.head.weight is tied.tokens.weight
    assert tied.to(torch.float64).head.weight is tied.tokens.weight
    assert free.head.weight.data_ptr() != free.tokens.weight.data_ptr()


@pytest.mark.parametrize("tie", [True, False])
def test_an_untrained_model_knows_nothing(tie):
    model = make(vocabulary=256, width=128, tie=tie)
    logits = model(tokens((64, 16), vocabulary=256))
    loss = cross_entropy(logits.flatten(0, 1), tokens((64, 16), vocabulary=256, seed=2).flatten())
    # Logits of variance s^2 add about s^2 / 2 to ln 256; here s^2 = 128 * 0.02^2.
    assert float(loss.detach()) == pytest.approx(math.log(256) + 128 * 0.02**2 / 2, abs=0.02)


def test_initial_weights_are_scaled_where_they_write_to_the_residual_stream():
    layer = make(width=128, layers=8).layers[3]
    assert float(layer.attention.q.weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    assert float(layer.attention.o.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert float(layer.mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.03)


def test_weights_come_from_the_seed():
    first, same, other = make(seed=3), make(seed=3), make(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.tokens.weight, other.tokens.weight)


def test_names_that_plans_are_written_with():
    names = {name for name, _ in make().named_parameters()}
    for part in ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down"):
        assert f"layers.1.{part}.weight" in names


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (16, 1), (80, 2), (112, 2)])
def test_heads_default_to_one_for_32_of_the_width_that_divides_it(width, heads):
    assert width // GPT(layers=1, width=width, context=4).layers[0].attention.head_width == heads


@pytest.mark.parametrize("heads", [3, 0, -1])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    with pytest.raises(ValueError, match=f"width 32 is not a multiple of heads {heads}"):
        make(heads=heads)


def test_attention_equals_the_formula():
    torch.manual_seed(0)
    attention = Attention(width=12, heads=3, dropout=0.0).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = (x @ part.weight.T for part in (attention.q, attention.k, attention.v))
    heads = []
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        scores = q[..., part] @ k[..., part].mT / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), torch.cat(heads, -1) @ attention.o.weight.T)


def test_half_the_heads_on_each_of_two_devices_add_up_to_the_whole():
    torch.manual_seed(0)
    whole = Attention(width=16, heads=4, dropout=0.0).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    total = torch.zeros_like(x)
    for half in (slice(0, 8), slice(8, 16)):
        part = Attention(width=16, heads=4, dropout=0.0).double()
        for name in ("q", "k", "v"):
            getattr(part, name).weight = torch.nn.Parameter(getattr(whole, name).weight[half])
        part.o.weight = torch.nn.Parameter(whole.o.weight[:, half])
        total = total + part(x)
    torch.testing.assert_close(total, whole(x))


def test_gradients_of_a_layer_equal_finite_differences():
    torch.manual_seed(0)
    layer = Layer(width=8, heads=2, dropout=0.0).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def run(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


def test_dropout_is_drawn_from_torch_and_only_in_training():
    model, batch = make(dropout=0.5), tokens((2, 16))
    torch.manual_seed(7)
    first = model(batch)
    torch.manual_seed(7)
    assert torch.equal(first, model(batch))
    assert not torch.equal(first, model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_generate_continues_past_the_context():
    prompt = tokens((2, 3))
    out = make().generate(prompt, length=30)
    assert out.shape == (2, 33)
    assert torch.equal(out[:, :3], prompt)
    assert int(out.min()) >= 0
    assert int(out.max()) < 50


def test_generate_depends_on_weights_and_its_seed_alone():
    model, prompt = make(dropout=0.5), tokens((1, 3))
    first = model.generate(prompt, length=20, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, model.generate(prompt, length=20, seed=5))
    assert not torch.equal(first, model.generate(prompt, length=20, seed=6))


def test_generate_leaves_torch_and_the_model_as_they_were():
    model = make().train()
    state = torch.get_rng_state()
    model.generate(tokens((1, 3)), length=2)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not model.eval().generate(tokens((1, 3)), length=2).requires_grad
    assert not model.training


def test_temperature_zero_takes_the_likeliest_token():
    model, prompt = make().eval(), tokens((2, 3))
    expected = prompt
    for _ in range(4):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(prompt, length=4, temperature=0.0), expected)
    # Nearly no temperature is nearly the same: the draw follows the logits.
    assert torch.equal(model.generate(prompt, length=4, temperature=1e-6), expected)
