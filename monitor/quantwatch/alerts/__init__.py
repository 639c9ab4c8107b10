"""Rules and verdicts: pure functions from measurements to alerts; no clock, no database."""
