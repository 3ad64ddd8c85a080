"""Configuration files; `--config NAME` finds them by name."""
