"""How numbers are written for a person."""

import pytest

from mgpu.loggers._numbers import duration_text, learning_rate_text, loss_text, metric_text, norm_text, rate_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.431, "2.4310"),
        (0, "0.0000"),
        (-1.25, "-1.2500"),
        (0.001, "0.0010"),
        (0.00031, "3.100e-04"),
        (12345.6, "1.235e+04"),
        (float("nan"), "nan"),
        ("inf", "inf"),
        (None, "None"),
    ],
)
def test_loss(value, text):
    assert loss_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.7149, "0.71"), (0.0042, "4.2e-03"), (0.0, "0.00"), ("nan", "nan")])
def test_norm(value, text):
    assert norm_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (3.21, "3.2"),
        (9.94, "9.9"),
        (9.96, "10"),
        (512, "512"),
        (999.4, "999"),
        (999.7, "1.0k"),
        (32768, "32.8k"),
        (999_940, "999.9k"),
        (999_960, "1.0M"),
        (2.5e9, "2.5G"),
        (1e15, "1000.0T"),
        ("inf", "inf"),
        (float("inf"), "inf"),
    ],
)
def test_rate(value, text):
    assert rate_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(42, "0:42"), (59.6, "1:00"), (0.2, "0:00"), (3599, "59:59"), (3723, "1:02:03"), (86400 * 2 + 3600 * 3, "2d 3h")],
)
def test_duration(value, text):
    assert duration_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.981, "0.981"), (2.01375, "2.014"), (10000, "10000"), ("nan", "nan")])
def test_metric(value, text):
    assert metric_text(value) == text


def test_learning_rate():
    assert (learning_rate_text(3e-4), learning_rate_text(0), learning_rate_text("nan")) == ("3.0e-04", "0.0e+00", "nan")
