"""When something is due: pure functions from a schedule and an instant to instants."""
