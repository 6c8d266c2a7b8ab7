"""Stage II: verified trajectories become weights. Filter, objective, trainer, command."""
