"""Transforms over companions: pure, DataFrame to DataFrame, one concept in each module."""
