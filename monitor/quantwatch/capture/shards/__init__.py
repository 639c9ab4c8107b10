"""A night in pieces that may be measured anywhere, and put together again to the same bits."""
