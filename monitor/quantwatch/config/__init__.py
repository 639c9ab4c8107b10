"""quantwatch.toml: what is watched, how, and what counts as a regression."""
