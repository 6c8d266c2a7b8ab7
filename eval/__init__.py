"""Evaluation: generate, score, metrics, comparison and reports."""
