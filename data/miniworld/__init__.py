"""The mini-world: small arithmetic families, scripted experts and scripted dialogues. No torch."""
