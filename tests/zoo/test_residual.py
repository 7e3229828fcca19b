"""ResidualNet: shapes, independence of samples, gradients."""

import pytest
import torch

from mgpu.zoo import ResidualNet
from mgpu.zoo.residual import Block


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 8, 10), (3, 32, 100), (1, 2, 2), (1, 7, 10)])
def test_logits_have_one_row_an_image(channels, size, classes):
    model = ResidualNet(width=8, blocks=1, classes=classes, channels=channels)
    assert model(torch.rand(4, channels, size, size)).shape == (4, classes)


def test_a_parameter_count_by_hand():
    # Stem 9*8; block 8->8: 2 norms of 2*8, 2 convolutions of 9*8*8; block 8->16: norms 2*8 + 2*16, convolutions
    # 9*8*16 + 9*16*16, shortcut 8*16; the last norm 2*16; head 16*10 + 10.
    count = 72 + (32 + 2 * 576) + (48 + 1152 + 2304 + 128) + 32 + 170
    assert sum(parameter.numel() for parameter in ResidualNet(width=8, blocks=1).parameters()) == count


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_each_resolution_has_that_many_blocks(blocks):
    model = ResidualNet(width=8, blocks=blocks)
    assert len(model.layers) == 2 * blocks
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_a_sample_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    model = ResidualNet(width=8, blocks=1).double()
    images = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[3:4], model(images[3:4]))


def test_without_its_inner_part_a_block_hands_its_input_on():
    block = Block(8, 8, stride=1)
    torch.nn.init.zeros_(block.conv_2.weight)
    x = torch.rand(2, 8, 4, 4)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(("before", "after", "stride"), [(2, 2, 1), (2, 4, 2)])
def test_gradients_of_a_block_equal_finite_differences(before, after, stride):
    torch.manual_seed(0)
    block = Block(before, after, stride).double()
    x = torch.randn(2, before, 4, 4, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*block.named_parameters(), strict=True)

    def run(x, *weights):
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


def test_dropout_is_drawn_from_torch_and_only_in_training():
    model, images = ResidualNet(width=8, blocks=1, dropout=0.5), torch.rand(2, 1, 8, 8)
    torch.manual_seed(7)
    first = model(images)
    torch.manual_seed(7)
    assert torch.equal(first, model(images))
    assert not torch.equal(first, model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
