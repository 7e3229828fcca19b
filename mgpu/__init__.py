"""mgpu: one YAML file, one command, any number of GPUs. The layout is never part of the result."""

__version__ = "0.1.0"
