"""Queues what is due: one run per slot, whoever and however many schedule."""
