"""The version, alone, so that builds can read it without importing torch."""

__version__ = "0.1.0"
