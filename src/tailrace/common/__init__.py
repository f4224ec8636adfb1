"""What every room uses, one of each: settings, limits, errors, clock, metrics, logging, timestamps."""
