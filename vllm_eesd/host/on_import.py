"""Do something with a module once it is imported: at once if it is, otherwise when its code has run."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Loader(Loader):
    """Stands before a module's own loader while the module is imported; afterwards nothing refers to it any more."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.run(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """First on `sys.meta_path`; knows the names that are waited for, and leaves the finding to all the others."""

    def __init__(self) -> None:
        self._actions: dict[str, tuple[Action, ...]] = {}
        self._lock = threading.Lock()
        self._searching = threading.local()

    def add(self, name: str, action: Action) -> None:
        with self._lock:
            known = self._actions.get(name, ())
            self._actions[name] = known if action in known else (*known, action)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def run(self, module: ModuleType) -> None:
        """Nothing an action raises may reach the code that imports the module."""
        for action in self._actions.get(module.__name__, ()):
            try:
                action(module)
            except Exception:
                logging.getLogger("vllm.eesd").exception("eesd: after the import of %s", module.__name__)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._actions or getattr(self._searching, "name", None) == fullname:
            return None
        # Another finder of this kind may ask all others too, this one among them.
        self._searching.name = fullname
        try:
            others = (f for f in list(sys.meta_path) if f is not self and hasattr(f, "find_spec"))
            spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        finally:
            self._searching.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


_FINDER = _Finder()


def when_imported(name: str, action: Action) -> None:
    """Call `action` with module `name`: now if it is imported, else before its importer gets it.

    It may be called more than once, and from another thread: that must not matter. An action equal to one that waits
    already is not kept twice.
    """
    _FINDER.add(name, action)
    module = sys.modules.get(name)
    if module is None:
        return
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        module = importlib.import_module(name)  # another thread has begun: wait until it is done
    action(module)
