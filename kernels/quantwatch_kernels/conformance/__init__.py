"""Every operator × back end × shape × dtype × layout against its float64 twin."""
