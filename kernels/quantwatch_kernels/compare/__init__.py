"""How far two models are from each other: output, lens, taps. Each op with its float64 twin."""
