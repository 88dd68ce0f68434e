"""The package version, read by the build and by `weave_moe.__version__`."""

__version__ = "0.1.0"
