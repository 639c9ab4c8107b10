"""Models that are servers: asked for the log-probabilities of prompts, never loaded."""
