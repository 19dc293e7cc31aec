"""Dotted paths in the configuration: from ``package.module.name`` to the object, with an error that helps."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any

from trainer.raised import raised


class DottedPathError(ValueError):
    """A dotted path that names nothing. Says how far it could be followed and what is nearest. Exit code 2."""


def resolve_dotted(path: str, purpose: str) -> Any:
    """The object that ``path`` (``package.module.name`` or ``package.module:name``) names.

    ``purpose`` says in the error what the path was for ("reward function"). Raises :class:`DottedPathError` when a
    part does not exist, or when importing the module fails.
    """
    parts = path.replace(":", ".").split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise DottedPathError(f"{purpose}: {path!r} is not a dotted path of the form package.module.name")
    module, rest = _import_longest(parts, path, purpose)
    found: Any = module
    for index, name in enumerate(rest):
        where = ".".join([module.__name__, *rest[:index]])
        try:
            found = getattr(found, name)
        except AttributeError:
            hint = _nearest(name, _names(found))
            raise DottedPathError(f"{purpose}: {path!r}: {where} has no {name!r}{hint}") from None
        except Exception as error:  # a package may import its parts when they are asked for
            raise DottedPathError(f"{purpose}: {path!r}: {where}.{name} cannot be had: {raised(error)}") from error
    if found is module:
        raise DottedPathError(f"{purpose}: {path!r} is a module; name the object inside it{_choice(_public(module))}")
    return found


def _import_longest(parts: list[str], path: str, purpose: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix that is a module; return it and the names that are left."""
    module: ModuleType | None = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if module is not None and ("__path__" not in vars(module) or importlib.util.find_spec(name) is None):
            return module, parts[count - 1 :]
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # the module exists, something that it imports does not
                raise DottedPathError(f"{purpose}: {path!r}: importing {name} failed: {raised(error)}") from error
            top = [found.name for found in pkgutil.iter_modules()]
            hint = _nearest(name, top)
            raise DottedPathError(
                f"{purpose}: {path!r}: there is no package or module {name!r}{hint}; it must be importable from the "
                "folder the command is run in, or installed"
            ) from error
        except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may end itself
            raise DottedPathError(f"{purpose}: {path!r}: importing {name} failed: {raised(error)}") from error
    assert module is not None
    return module, []


def _names(found: Any) -> list[str]:
    names = _public(found)
    if isinstance(found, ModuleType) and "__path__" in vars(found):
        names += [child.name for child in pkgutil.iter_modules(found.__path__)]
    return sorted(set(names))


def _public(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")]


def _nearest(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(repr(match) for match in close)}?"
    return _choice(candidates) if len(candidates) <= 12 else ""


def _choice(candidates: list[str]) -> str:
    return f"; it has {', '.join(candidates)}" if candidates else ""
