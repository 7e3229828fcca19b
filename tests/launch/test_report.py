"""The last lines on the screen: bounded, and nothing that a terminal would obey."""

from mgpu.launch.report import cause_lines

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
