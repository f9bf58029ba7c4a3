"""Training a draft head for a target: its own answers, its features, the steps."""
