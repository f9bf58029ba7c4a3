"""Subcommands of `valuspec`."""
