"""`python -m trimtab`."""

from trimtab.cli.main import entry

entry()
