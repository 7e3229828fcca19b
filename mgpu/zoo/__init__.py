"""Small models and data sets for configs and tests; nothing is downloaded."""

from mgpu.zoo.digits import Digits
from mgpu.zoo.gpt import GPT
from mgpu.zoo.language import NextByte
from mgpu.zoo.python_source import PythonSource
from mgpu.zoo.residual import ResidualNet

__all__ = ["GPT", "Digits", "NextByte", "PythonSource", "ResidualNet"]
