"""The command line: one file per command group. Loads no torch, SQLAlchemy or pydantic."""

from quantwatch.cli.app import main

__all__ = ["main"]
