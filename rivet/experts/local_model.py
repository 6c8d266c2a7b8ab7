"""A Hugging Face chat model of this machine as an expert: messages in, a completion out.

Questions that come at the same time are answered in one continuous batch by the rollout engine's
own backend, each with its own length, temperature and seed. The request is foreign text: control
tokens in it are escaped, so that it cannot end its turn or begin another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rivet.chat_api import RequestError
from rivet.experts.server import ChatCompletion, ChatQuestion, ServerError
from rivet.rollout.backend import BackendError, SamplingParams
from rivet.tokenization import ProtocolTokenizer, TokenizerError

_DEFAULT_MAX_TOKENS = 1024


class LocalModel:
    """Implements `rivet.experts.server.ChatModel`.

    Args:
        folder: Weights, tokenizer and chat template, as Hugging Face saves them.
        max_batch: Questions that are answered at the same time; others wait.
        device: Such as `cuda:0`; None takes a GPU if there is one.
        dtype: Number format of the weights; `auto` keeps theirs.

    Raises:
        ServerError: It is no such model, or one that the backend cannot run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_batch: int = 16,
        device: str | None = None,
        dtype: str = "auto",
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rivet.rollout.local import LocalBackend

        if not (Path(folder) / "config.json").is_file():
            raise ServerError(
                f"{folder}: no config.json; expected a folder with a Hugging Face model"
            )
        try:
            self._tokenizer = ProtocolTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            if not self._tokenizer.hf.chat_template:
                raise TokenizerError("the tokenizer has no chat template; expected a chat model")
            self._defaults = model.generation_config
            self._backend = LocalBackend(
                model.eval(),
                self._tokenizer,
                max_batch=max_batch,
                device=device or ("cuda" if torch.cuda.is_available() else None),
            )
        except (OSError, ValueError) as error:
            raise ServerError(
                f"{folder}: cannot be served here ({error}); try --engine vllm, or another server "
                "with an OpenAI-compatible endpoint"
            ) from error

    async def aclose(self) -> None:
        """Let the model go."""
        await self._backend.close()

    async def complete(self, question: ChatQuestion) -> ChatCompletion:
        """Answer one question.

        Raises:
            RequestError: It does not fit into the model's context, or the model failed.
        """
        ids = self._prompt(question.messages)
        if len(ids) >= self._backend.max_context:
            raise RequestError(
                400,
                f"the messages have {len(ids)} tokens; this model takes at most "
                f"{self._backend.max_context - 1}",
                param="messages",
                code="context_length_exceeded",
            )
        try:
            generation = await self._backend.generate(
                ids,
                stop=(),
                max_new_tokens=question.max_tokens or _DEFAULT_MAX_TOKENS,
                sampling=self._sampling(question),
                seed=question.seed,
            )
        except BackendError as error:
            raise RequestError(500, f"the model failed: {type(error).__name__}") from error
        text = self._tokenizer.hf.decode(generation.ids, skip_special_tokens=True)
        reason = "length" if generation.finish_reason == "length" else "stop"
        return ChatCompletion(str(text), len(ids), len(generation.ids), reason)

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        escaped = [{**m, "content": self._tokenizer.escape(m["content"])} for m in messages]
        try:
            rendered = self._tokenizer.hf.apply_chat_template(
                escaped, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of its own
            raise RequestError(
                400, f"the chat template refuses these messages ({type(error).__name__})"
            ) from error
        return self._tokenizer.encode(str(rendered))

    def _sampling(self, question: ChatQuestion) -> SamplingParams:
        """As asked for; else as the model's own settings say."""
        defaults = self._defaults
        usual = 0.0 if defaults.do_sample is False else defaults.temperature
        temperature = usual if question.temperature is None else question.temperature
        top_p = defaults.top_p if question.top_p is None else question.top_p
        return SamplingParams(
            1.0 if temperature is None else temperature,
            1.0 if top_p is None else top_p,
            defaults.top_k or 0,
        )
