"""The deployed model behind the OpenAI chat API, with a web page and metrics."""
