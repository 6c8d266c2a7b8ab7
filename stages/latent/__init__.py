"""Training of latent collaboration (n-Musketeers, arXiv:2602.09173) on Stage I's trainer."""
