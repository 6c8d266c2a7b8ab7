"""Latent collaboration (n-Musketeers, arXiv:2602.09173): frozen experts share hidden states.

    problem text -> experts.FrozenExpert -> cache -> states.ExpertStates     H, read once
    H -> adapter.LatentAdapter -> context C of K tokens                      g_phi
    [x || C] -> policy.LatentPolicy -> completion                            pi_theta

The experts may be any causal language models of any width, depth and tokenizer, and are never
trained. What trains theta and phi is in `stages.latent`.
"""
