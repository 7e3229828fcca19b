"""Whether a target takes its arguments, told before anything is built."""

import dataclasses
import functools

import pytest

from mgpu.spec import Target
from mgpu.train.targets import TargetError, build, check


@dataclasses.dataclass
class Plain:
    hidden_size: int = 1
    layers: int = 1


@dataclasses.dataclass
class Open:
    """Made as the configs of transformers are: what is no field is kept all the same, and the signature does not show it."""

    hidden_size: int
    layers: int = 1


def _open(kind):
    made = kind.__init__

    @functools.wraps(made)
    def keep(self, *args, **kwargs):
        fields = {field.name for field in dataclasses.fields(kind)}
        made(self, *args, **{name: value for name, value in kwargs.items() if name in fields})
        vars(self).update(kwargs)

    kind.__init__ = keep
    return kind


_open(Open)


def target(kind, **args):
    return Target(target=f"{__name__}:{kind.__name__}", args=args)


def test_a_dataclass_that_keeps_any_name_is_given_it():
    spec = target(Open, hidden_size=4, attn_implementation="eager")
    check(spec, ("model",))
    assert vars(build(spec)) == {"hidden_size": 4, "layers": 1, "attn_implementation": "eager"}


@pytest.mark.parametrize(
    "spec, told",
    [
        (target(Open, hidden_size=4, hiden_size=4), r"takes no argument 'hiden_size'"),
        (target(Open, attn_implementation="eager"), r"missing a required argument: 'hidden_size'"),
        (target(Plain, attn_implementation="eager"), r"takes no argument 'attn_implementation'"),
    ],
)
def test_a_slip_a_missing_argument_and_a_name_too_many_are_told(spec, told):
    with pytest.raises(TargetError, match=told):
        check(spec, ("model",))


def test_the_config_of_a_transformers_model_takes_what_it_has_no_field_for():
    spec = Target(target="transformers:LlamaConfig", args={"hidden_size": 32, "attn_implementation": "eager"})
    check(spec, ("model",))
    with pytest.raises(TargetError, match="hiden_size"):
        check(Target(target="transformers:LlamaConfig", args={"hiden_size": 32}), ("model",))
