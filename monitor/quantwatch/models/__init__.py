"""Models: where they come from, how they are loaded, what identifies them."""
