"""Which samples of a pool a recipe is calibrated on."""
