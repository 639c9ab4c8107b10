"""A small continuous-batching engine over the paged cache; `engine.Engine` is the door."""
