"""Which packages that tests may use are there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> bool:
    """Whether a package is installed, by its name at pip: a folder of tests may have the module's name."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
