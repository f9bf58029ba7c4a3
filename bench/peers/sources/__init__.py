"""Peers' draft sources inside this engine, each with its own rule, so that drafts are compared."""
