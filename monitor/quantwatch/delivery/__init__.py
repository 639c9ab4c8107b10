"""Brings messages to their receivers: at least once, in order, only where they may go."""
