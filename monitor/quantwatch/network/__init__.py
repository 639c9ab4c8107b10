"""Whom this program may talk to, and how: one guarded exchange, bounded in time and size."""
