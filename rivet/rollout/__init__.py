"""Rollouts: one coroutine a trajectory, over a controller backend, experts and a sandbox."""
