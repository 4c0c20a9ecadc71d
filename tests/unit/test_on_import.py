"""An action waits for a module's import, whoever imports it and however, and never gets into its way."""

import importlib
import sys
import threading

import pytest

from vllm_eesd.host import on_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return write(source): the name of a fresh module with that source."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(source="def f():\n    return 1\n"):
        name = f"eesd_waited_for_{len(names)}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        importlib.invalidate_caches()
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
        on_import._FINDER._actions.pop(name, None)


def test_it_runs_before_the_importer_gets_the_module(module):
    name, seen = module(), []
    on_import.when_imported(name, lambda m: (seen.append(m.__name__), setattr(m, "f", lambda: 2)))
    assert not seen and name not in sys.modules
    scope = {}
    exec(f"from {name} import f", scope)  # takes the function by value
    assert scope["f"]() == 2 and seen == [name]


def test_it_runs_at_once_where_the_module_is_imported(module):
    name, seen = module(), []
    importlib.import_module(name)
    on_import.when_imported(name, seen.append)
    assert seen == [sys.modules[name]]


def test_the_module_looks_as_if_nobody_had_waited(module):
    name, plain = module(), module()
    on_import.when_imported(name, lambda m: None)
    waited, other = importlib.import_module(name), importlib.import_module(plain)
    assert type(waited.__loader__) is type(other.__loader__) is type(waited.__spec__.loader)
    assert waited.__loader__.get_source(name) == other.__loader__.get_source(plain)
    assert waited.__cached__ and waited.__file__.endswith(f"{name}.py")


def test_an_action_that_fails_does_not_reach_the_importer(module, log_lines):
    name, seen = module(), []
    on_import.when_imported(name, lambda m: 1 / 0)
    on_import.when_imported(name, seen.append)
    assert importlib.import_module(name).f() == 1
    assert len(seen) == 1 and "ZeroDivisionError" in log_lines[0]


def test_a_module_that_fails_fails_as_ever(module):
    name, seen = module("raise KeyError('its own')\n"), []
    on_import.when_imported(name, seen.append)
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        on_import.when_imported("eesd_no_such_module", seen.append)
        importlib.import_module("eesd_no_such_module")
    assert not seen


def test_the_same_action_is_kept_once(module):
    name, seen = module(), []
    for _ in range(3):
        on_import.when_imported(name, seen.append)
    importlib.import_module(name)
    assert len(seen) == 1


def test_another_finder_that_asks_all_others_is_no_circle(module, monkeypatch):
    name, seen = module(), []

    class Asking:
        def find_spec(self, fullname, path=None, target=None):
            others = (finder for finder in sys.meta_path if finder is not self)
            return next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)

    on_import.when_imported(name, seen.append)
    monkeypatch.setattr(sys, "meta_path", [on_import._FINDER, Asking(), *sys.meta_path[1:]])
    importlib.import_module(name)
    assert len(seen) == 1


def test_a_module_that_another_thread_is_importing_is_waited_for(module):
    name, seen, begun = module("import time\nimport sys\nsys.eesd_begun.set()\ntime.sleep(0.2)\nf = 1\n"), [], None
    begun = sys.eesd_begun = threading.Event()
    try:
        thread = threading.Thread(target=importlib.import_module, args=(name,))
        thread.start()
        begun.wait()
        on_import.when_imported(name, lambda m: seen.append(m.f))
        thread.join()
    finally:
        del sys.eesd_begun
    assert seen == [1]
