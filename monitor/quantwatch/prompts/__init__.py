"""Prompt suites: the shipped ones and users' own files, turned into token ids exactly once."""
