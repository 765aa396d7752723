"""megamoe: an SM90 FP8 Mixture-of-Experts mega kernel and the harness that proves it.

One import name. A checkout keeps ``phases/`` and ``tuning/`` at the top level, where an engineer looks for them;
a wheel installs them below this package. Both are imported as ``megamoe_cli.phases`` and ``megamoe_cli.tuning``:
in a wheel Python finds them by itself, in a checkout the finder below does, with nothing installed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from os.path import abspath, dirname, isfile, join

__version__ = "0.1.0"

_HERE = dirname(abspath(__file__))
_ROOT = dirname(_HERE)
_CHECKOUT_PACKAGES = ("phases", "tuning")


class _CheckoutFinder:
    """Maps ``megamoe_cli.phases`` to ``<checkout>/phases``; asked only after the ordinary import path failed."""

    root = _ROOT

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__ or name not in _CHECKOUT_PACKAGES or not isfile(join(_ROOT, "pyproject.toml")):
            return None
        init = join(_ROOT, name, "__init__.py")
        if not isfile(init):
            return None
        spec = ModuleSpec(fullname, SourceFileLoader(fullname, init), origin=init, is_package=True)
        spec.submodule_search_locations = [join(_ROOT, name)]
        spec.has_location = True
        return spec


# By name, not by type: a reload makes a new class, and one finder is enough.
if not any(getattr(f, "__name__", "") == "_CheckoutFinder" and getattr(f, "root", "") == _ROOT for f in sys.meta_path):
    sys.meta_path.append(_CheckoutFinder)
