"""Stage I: expert-augmented reinforcement learning of the controller."""
