"""Experts: LLMs behind OpenAI-compatible endpoints that the controller may consult."""
