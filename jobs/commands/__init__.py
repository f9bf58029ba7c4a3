"""Subcommands of `valuspec` that work on recorded answers."""
