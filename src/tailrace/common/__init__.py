"""Shared foundations: settings, limits, errors, clock, metrics, logging, timestamps."""
