"""Model, objective and optimizer of a configuration."""
