"""Plans from measured samples: pure functions, no tensor, no clock, no file."""
