"""Forecasts for checkpoints that are not converted yet."""
