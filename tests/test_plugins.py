"""A plugin is one file: its name is the file's, and it is found without being listed anywhere."""

import sys
from importlib import metadata

import pytest

from mgpu.errors import Refusal, UnknownName
from mgpu.plugins import find_plugin, plugin_names

BASE = "class Animal: pass\n"
CAT = "from zoo_of_plugins.base import Animal\nclass Cat(Animal): pass\nclass _Kitten(Cat): pass\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "zoo_of_plugins"
    folder.mkdir()
    files = {"__init__": "", "base": BASE, "cat": CAT, "_fur": "", "broken": "import no_such_module_here\n"}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("zoo_of_plugins")]:
        del sys.modules[name]


@pytest.fixture
def find(package):
    from zoo_of_plugins.base import Animal

    return lambda name: find_plugin("animal", name, "zoo_of_plugins", Animal)


def test_names_are_the_files_and_none_is_imported(package):
    assert plugin_names("zoo_of_plugins") == ["broken", "cat"]
    assert "zoo_of_plugins.cat" not in sys.modules


def test_a_built_in_name_gives_the_one_public_subclass(find):
    assert find("cat").__name__ == "Cat"


def test_a_built_in_name_is_found_without_asking_for_entry_points(find, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("asked"))
    find("cat")


def test_a_new_file_is_a_new_plugin(find, package):
    (package / "dog.py").write_text(CAT.replace("Cat", "Dog"))
    assert find("dog").__name__ == "Dog"


def test_a_class_can_be_named_by_its_place(find, package):
    (package.parent / "farm_of_plugins.py").write_text(CAT.replace("Cat", "Cow"))
    assert find("farm_of_plugins:Cow").__name__ == "Cow"


def test_an_installed_plugin_is_found_by_its_entry_point(find, monkeypatch):
    point = metadata.EntryPoint("tiger", "zoo_of_plugins.cat:Cat", "zoo_of_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "zoo_of_plugins" else [])
    assert find("tiger").__name__ == "Cat"
    with pytest.raises(UnknownName) as caught:
        find("tigre")
    assert caught.value.hint == "did you mean tiger?"


def test_an_unknown_name_gets_the_nearest(find):
    with pytest.raises(UnknownName) as caught:
        find("cta")
    assert (caught.value.message, caught.value.hint) == ("unknown animal 'cta'", "did you mean cat?")


@pytest.mark.parametrize("name", ["base", "_fur", "", "zoo_of_plugins.cat"])
def test_what_is_no_plugin_is_unknown(find, name):
    with pytest.raises(UnknownName):
        find(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_here:Cat", "animal 'no_such_module_here:Cat' cannot be imported: No module named"),
        ("zoo_of_plugins.broken:Cat", "No module named 'no_such_module_here'"),
        ("zoo_of_plugins.cat:Cta", "has no attribute 'Cta'"),
        ("zoo_of_plugins.cat:Cat.__name__", "is not a subclass of zoo_of_plugins.base.Animal"),
        ("collections:OrderedDict", "is not a subclass of zoo_of_plugins.base.Animal"),
        (":Cat", "write package.module:Class"),
        (".cat:Cat", "write package.module:Class"),
        ("zoo_of_plugins.cat:", "write package.module:Class"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(find, name, says):
    with pytest.raises(Refusal) as caught:
        find(name)
    assert says in caught.value.message


def test_a_file_with_two_plugins_is_a_mistake_of_its_author(find, package):
    (package / "twins.py").write_text(CAT + "class Lynx(Animal): pass\n")
    with pytest.raises(TypeError, match="defines 2 public subclasses of Animal"):
        find("twins")
