"""Makes a process forget modules for the time of a test, as if they had never been imported."""

import sys


def forget(monkeypatch, *prefixes):
    """Forgets the modules whose names begin so; afterwards `sys.modules` and their packages have them again."""
    for name in [name for name in sys.modules if name.startswith(prefixes)]:
        package, _, child = name.rpartition(".")
        if hasattr(sys.modules.get(package), child):
            monkeypatch.setattr(sys.modules[package], child, sys.modules[name])  # the undo puts it back
    for name in [name for name in sys.modules if name.startswith(prefixes)]:
        monkeypatch.delitem(sys.modules, name)
