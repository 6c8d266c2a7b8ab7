"""The latent world: four small families, three hard ones and one that the policy solves alone."""
