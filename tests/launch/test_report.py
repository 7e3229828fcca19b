"""The last lines on the screen: bounded, and nothing that a terminal would obey."""

import io

import pytest
from rich.console import Console

from mgpu.launch.report import cause_lines, print_report
from mgpu.runs import RunStore
from mgpu.runs.liveness import this_process

CAUSE = {"rank": 1, "host": "a", "what": "ValueError: bad", "place": "", "log": "", "victims": []}


def lines(**changes):
    return cause_lines({**CAUSE, **changes})


def test_one_victim_and_several():
    assert lines(victims=[0])[-1] == "followed by rank 0: a victim of the above"
    assert lines(victims=[0, 2])[-1] == "followed by ranks 0, 2: victims of the above"
    assert lines() == ["cause  rank 1 on a: ValueError: bad"]


def test_a_huge_message_is_cut_and_says_how_much_there_is():
    (line,) = lines(what="x" * 2_000_000)
    assert line == f"cause  rank 1 on a: {'x' * 500} ... (2,000,000 characters; the log has all)"
    (text,) = lines(what="\n".join(f"line {n}" for n in range(1000)))
    assert text.count("\n") == 19 and "line 19 ... (" in text and "line 20" not in text


def test_what_steers_a_terminal_is_shown_and_not_done():
    told = lines(what="\x1b[2Jgone\r\x07 grüße\tπ", details=["\x9b31m"])
    assert told == ["cause  rank 1 on a: \\x1b[2Jgone\\r\\x07 grüße\tπ", "       \\x9b31m"]


def reported(run, code):
    console = Console(file=io.StringIO(), width=40)
    print_report(run, 1, code, console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("folder, option", [("runs", ""), ("my runs [old]", " --runs-dir 'my runs [old]'")])
def test_what_comes_next_names_the_run_so_that_it_is_found(tmp_path, monkeypatch, folder, option):
    monkeypatch.chdir(tmp_path)
    run = RunStore(folder).create("gpt", "name: gpt\n", {}, ["mgpu"])
    run.record("attempt_started", attempt=1, **this_process())
    run.record("attempt_ended", attempt=1, state="completed", exit_code=0, step=3)
    named = f"'my runs [old]/{run.id}'" if option else "latest"
    assert reported(run, 0)[1:] == [f"next:  mgpu show {named}", f"       mgpu logs {named}", f"       mgpu ls{option}"]


def test_a_supervisor_that_ended_without_a_word_has_no_exit_code_for_a_follower(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunStore("runs").create("gpt", "name: gpt\n", {}, ["mgpu"])
    run.record("attempt_started", attempt=1, **{**this_process(), "process_start": 1})
    assert reported(run, run.exit_code)[0] == f"lost  {run.id}: its supervisor ended without a word"
    assert reported(run, 137)[0] == f"lost  {run.id}  exit 137: its supervisor ended without a word"
    assert reported(run, 137)[-1] == f"continue:  mgpu resume {run.id}"
    run.events_path.unlink()
    assert reported(run, None) == [f"{run.path} was removed"]
