"""How hints name a run: whatever they say has to find it again, in the shell they are read in."""

import shlex

import pytest

from mgpu.runs import Run, RunStore, shell_reference
from mgpu.runs.reference import folder_option


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def made(root):
    return RunStore(root).create("gpt", "name: gpt\n", {}, ["mgpu"])


def found(text):
    (word,) = shlex.split(text)
    return RunStore("runs").find(word)


def test_in_the_default_folder_it_is_the_id_and_latest_where_that_means_it(here):
    one = made("runs")
    assert shell_reference(one) == one.id
    assert shell_reference(one, may_be_latest=True) == "latest"
    assert folder_option(one) == ""
    other = made("runs")
    newest = RunStore("runs").list()[0]
    older = one if newest == other else other
    assert shell_reference(newest, may_be_latest=True) == "latest"
    assert shell_reference(older, may_be_latest=True) == older.id
    assert found(shell_reference(older)) == older


@pytest.mark.parametrize("folder, text", [("r1", "r1/{}"), ("my runs", "'my runs/{}'"), ("-odd", "./-odd/{}")])
def test_elsewhere_it_is_the_path(here, folder, text):
    run = made(here / folder)
    made("runs")
    assert shell_reference(run, may_be_latest=True) == text.format(run.id)
    assert found(shell_reference(run)) == run
    option, value = shlex.split(folder_option(run))
    assert option == "--runs-dir" and RunStore(value).list() == [run]


def test_inside_the_folder_of_the_run_its_path_is_no_id(here, monkeypatch):
    run = made("r1")
    monkeypatch.chdir(here / "r1")
    assert shell_reference(run) == f"./{run.id}"
    assert found(shell_reference(run)) == run


def test_the_absolute_path_is_taken_where_it_is_shorter(here, tmp_path, monkeypatch):
    run = made(tmp_path / "r1")
    assert shell_reference(run) == f"../r1/{run.id}"
    deep = here.joinpath(*["d"] * (1 + len(str(tmp_path)) // 3))
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert shell_reference(run) == str(run.path)


def test_a_way_through_a_link_is_not_shortened_into_another_folder(here, tmp_path):
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "other" / "inner")
    real = made(tmp_path / "other" / "r1")
    run = Run(here / "link" / ".." / "r1" / real.id)
    assert shell_reference(run) == str(run.path)
    assert found(shell_reference(run)) == real


def test_a_run_or_a_directory_that_is_gone_still_has_a_name(here, tmp_path):
    run, default = made("r1"), made("runs")
    RunStore("r1").remove(run)
    (here / "r1").rmdir()
    assert shell_reference(run) == str(run.path)
    RunStore("runs").remove(default)
    (here / "runs").rmdir()
    assert shell_reference(default) == default.id
