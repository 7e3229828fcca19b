"""What a person sees of a run: plain lines where there is no terminal, one live line where there is."""

import io
import json
import sys

import pytest
from rich.console import Console

from mgpu.loggers.console import ConsoleLogger, fit
from mgpu.runs import Run

VALUES = {"loss": 2.431, "lr": 3e-4, "grad_norm": 0.7149, "samples_per_s": 512.3, "units_per_s": 32787.2}


def plain(total=None, unit="sample"):
    stream = io.StringIO()
    return ConsoleLogger(Console(file=stream, width=20), total_steps=total, unit=unit), stream


def terminal(width=100, **how):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, legacy_windows=False, **how)
    return console, stream


def feed(logger, steps, seconds_a_step=0.1):
    for step in steps:
        logger.log(step, {**VALUES, "seconds": step * seconds_a_step})


def printed_steps(stream):
    return [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]


def test_a_plain_line_tells_all_at_any_width():
    logger, stream = plain(1200, "token")
    logger.log(50, {**VALUES, "seconds": 2.0})
    logger.log(100, {**VALUES, "seconds": 4.0})
    # 50 steps took 2 s; 1100 are left: 44 s.
    assert stream.getvalue().splitlines() == [
        "step 50/1200  loss 2.4310  lr 3.0e-04  grad 0.71  512 samples/s  32.8k tokens/s",
        "step 100/1200  loss 2.4310  lr 3.0e-04  grad 0.71  512 samples/s  32.8k tokens/s  eta 0:44",
    ]


def test_tokens_are_told_only_where_they_are_the_unit():
    logger, stream = plain(10, "sample")
    logger.log(1, VALUES)
    assert "tokens/s" not in stream.getvalue()


def test_what_is_missing_or_none_is_left_out():
    logger, stream = plain(10)
    logger.log(1, {"loss": "nan", "lr": None, "seconds": None})
    assert stream.getvalue() == "step 1/10  loss nan\n"


def test_the_time_left_follows_the_recent_pace():
    logger, stream = plain(1000)
    feed(logger, range(1, 101), 1.0)  # slow at first
    for step in range(101, 201):
        logger.log(step, {"loss": 1.0, "seconds": 100 + (step - 100) * 0.25})
    # The last line is of step 200: 800 steps at a quarter of a second.
    assert stream.getvalue().splitlines()[-1] == "step 200/1000  loss 1.0000  eta 3:20"


@pytest.mark.parametrize("total", [100, 1000, 12345])
def test_a_run_prints_some_25_lines_with_the_first_and_the_last(total):
    logger, stream = plain(total)
    feed(logger, range(1, total + 1), 0.001)
    logger.close("completed")
    steps = printed_steps(stream)
    assert (steps[0], steps[-1]) == (1, total)
    assert 20 <= len(steps) <= 30
    assert len(set(steps)) == len(steps)


def test_a_short_run_prints_every_step():
    logger, stream = plain(7)
    feed(logger, range(1, 8))
    logger.close("completed")
    assert printed_steps(stream) == [1, 2, 3, 4, 5, 6, 7]


def test_a_slow_run_prints_every_30_seconds_of_its_own_time():
    logger, stream = plain(100_000)
    feed(logger, range(1, 101), 10.0)
    assert printed_steps(stream) == list(range(1, 101, 3))


def test_without_a_total_lines_grow_rarer():
    logger, stream = plain(None)
    feed(logger, range(1, 101), 0.001)
    logger.close("interrupted")
    assert printed_steps(stream) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert stream.getvalue().splitlines()[0] == "step 1  loss 2.4310  lr 3.0e-04  grad 0.71  512 samples/s"


def test_the_last_step_told_is_printed_when_a_run_stops_early():
    logger, stream = plain(1000)
    feed(logger, range(1, 58))
    logger.close("failed")
    logger.close("failed")
    assert printed_steps(stream) == [1, 40, 57]


def test_a_second_attempt_starts_its_lines_and_its_pace_anew():
    logger, stream = plain(1000)
    feed(logger, range(1, 46), 1.0)
    logger.log(41, {"loss": 1.0, "seconds": 0.5})
    logger.log(80, {"loss": 1.0, "seconds": 20.0})
    # 39 steps took 19.5 s; 920 are left.
    assert stream.getvalue().splitlines()[-2:] == ["step 41/1000  loss 1.0000", "step 80/1000  loss 1.0000  eta 7:40"]


def test_size_and_unit_come_from_the_plan(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 40, "unit": "token"}))
    stream = io.StringIO()
    logger = ConsoleLogger(Console(file=stream))
    logger.open(Run(tmp_path), resume_step=0)
    logger.log(1, {"units_per_s": 10.0})
    assert stream.getvalue() == "step 1/40  10 tokens/s\n"


def test_an_unknown_size_comes_from_the_training_event(tmp_path):
    run = Run(tmp_path)
    run.plan_path.write_text(json.dumps({"steps": None}))
    run.events_path.touch()
    stream = io.StringIO()
    logger = ConsoleLogger(Console(file=stream))
    logger.open(run, resume_step=0)
    run.record("training", attempt=1, start_step=0, total_steps=60)
    logger.log(1, {})
    assert stream.getvalue() == "step 1/60\n"


def test_an_evaluation_is_one_line():
    logger, stream = plain(1200)
    logger.evaluated(400, {"step": 400, "loss": 2.01, "accuracy": 0.981})
    assert stream.getvalue() == "eval at step 400  loss 2.01  accuracy 0.981\n"


def test_rank_output_is_printed_whole_and_without_control_codes():
    logger, stream = plain()
    logger.print_line("\x1b[31mred\x1b[0m [bold]not markup[/bold] " + "x" * 200 + "\n")
    logger.print_line("  5%\r 50%\r100%\r\nnext\x1b[2K\x1b[1A\x1b]0;title\x07 line\ttab\x08", style="dim")
    assert stream.getvalue() == f"red [bold]not markup[/bold] {'x' * 200}\n100%\nnext line\ttab\n"


def test_without_a_terminal_there_are_no_escape_codes():
    logger, stream = plain(30, "token")
    feed(logger, range(1, 31))
    logger.evaluated(30, {"loss": 1.0})
    logger.print_line("\x1b[1mbold\x1b[m", style="red")
    logger.close("completed")
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    console, stream = terminal(_environ={"TERM": "dumb"})
    logger = ConsoleLogger(console, total_steps=5)
    feed(logger, range(1, 6))
    logger.print_line("\x1b[31mred")
    logger.close("completed")
    assert "\x1b" not in stream.getvalue()
    assert printed_steps(io.StringIO(stream.getvalue().replace("red\n", ""))) == [1, 2, 3, 4, 5]


def test_a_terminal_shows_a_live_line_and_leaves_the_last_step():
    console, stream = terminal(120)
    logger = ConsoleLogger(console, total_steps=1200, unit="token")
    logger.log(300, {**VALUES, "seconds": 12.0})
    first = stream.getvalue()
    assert all(
        text in first for text in ("━", "step 300/1200", "loss 2.4310", "3.0e-04", "512 samples/s", "32.8k tokens/s")
    )
    logger.print_line("from a rank", style="dim")
    assert "from a rank" in stream.getvalue()[len(first) :]
    before = len(stream.getvalue())
    logger.close("completed")
    rest = stream.getvalue()[before:]
    assert rest.endswith("step 300/1200  loss 2.4310  lr 3.0e-04  grad 0.71  512 samples/s  32.8k tokens/s\n")
    assert "\x1b[?25h" in rest  # the cursor is shown again
    logger.print_line("after")
    assert stream.getvalue().endswith("after\n")


def test_a_live_line_does_not_redirect_stdout(capsys):
    console, _ = terminal()
    logger = ConsoleLogger(console, total_steps=10)
    out = sys.stdout
    logger.log(1, VALUES)
    assert sys.stdout is out
    logger.close("completed")


@pytest.mark.parametrize(("no_color", "has_colour"), [("1", False), ("", True)])
def test_no_color_takes_the_colours_away(no_color, has_colour):
    console, stream = terminal(_environ={"NO_COLOR": no_color, "TERM": "xterm-256color"})
    logger = ConsoleLogger(console, total_steps=10)
    logger.print_line("\x1b[31mred\x1b[0m")
    logger.log(5, VALUES)
    logger.close("completed")
    assert ("\x1b[31m" in stream.getvalue()) is has_colour
    assert "━" in stream.getvalue()


def test_colours_of_a_rank_pass_on_a_terminal():
    console, stream = terminal(color_system="standard")
    ConsoleLogger(console).print_line("\x1b[31mred\x1b[0m \x1b[2Kplain")
    assert stream.getvalue() == "\x1b[31mred\x1b[0m plain\n"


CELLS = {
    "step": "step 100/1200",
    "loss": "loss 2.4310",
    "lr": "lr 3.0e-04",
    "grad": "grad 0.71",
    "samples/s": "512 samples/s",
    "tokens/s": "32.8k tokens/s",
    "eta": "eta 0:42",
}


def test_a_wide_terminal_has_room_for_all_and_a_longer_bar():
    # 13+11+10+9+13+14+8 = 78 and 7 gaps of 2 are 92; one column stays free.
    assert list(fit(CELLS, 103, with_bar=True)) == ["bar", *CELLS]
    assert len(fit(CELLS, 103, with_bar=True)["bar"]) == 10
    assert len(fit(CELLS, 110, with_bar=True)["bar"]) == 17
    assert len(fit(CELLS, 300, with_bar=True)["bar"]) == 40


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (102, ["bar", "step", "loss", "lr", "samples/s", "tokens/s", "eta"]),
        (80, ["bar", "step", "loss", "samples/s", "tokens/s", "eta"]),
        (79, ["bar", "step", "loss", "tokens/s", "eta"]),
        (65, ["bar", "step", "loss", "tokens/s", "eta"]),
        (50, ["bar", "step", "loss", "eta"]),
        (37, ["step", "loss", "eta"]),
        (30, ["step", "loss"]),
        (20, ["step"]),
        (5, ["step"]),
    ],
)
def test_columns_drop_as_the_terminal_narrows(width, names):
    assert list(fit(CELLS, width, with_bar=True)) == names


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
def test_the_live_line_never_wraps(width):
    console, stream = terminal(width, color_system=None)
    logger = ConsoleLogger(console, total_steps=1200, unit="token")
    logger.log(100, {**VALUES, "seconds": 4.0})
    shown = stream.getvalue().partition("\x1b[?25l")[2]
    assert "step 100/1200" in shown
    assert "\n" not in shown
    assert len(shown.replace("\r", "").replace("\x1b[2K", "")) < width
    logger.close("completed")


def test_the_live_line_makes_way_for_others_and_comes_back():
    console, stream = terminal()
    logger = ConsoleLogger(console, total_steps=10)
    with logger.aside():
        console.file.write("before the first step\n")
    logger.log(1, VALUES)
    with logger.aside():
        # Erased: the cursor is shown again at the beginning of an empty line.
        assert stream.getvalue().endswith("\x1b[2K")
        console.file.write("from a rank\n")
    assert "step 1/10" in stream.getvalue().rpartition("from a rank\n")[2]
    logger.close("completed")
