"""The version of the installed distribution.

The number stands once, in `pyproject.toml`; this module only reads it back from the installed
metadata. It knows nothing else and imports only the standard library.
"""

from importlib.metadata import version

__version__: str = version("spec-serve")
