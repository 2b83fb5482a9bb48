"""Cache simulation on recorded routes."""
