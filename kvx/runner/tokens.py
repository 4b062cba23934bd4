"""Tokenizer: text to ids and back, and the chat template, of a model folder or a GGUF file, through transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvx.errors import BadArgument, Unsupported


class Tokenizer:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Offline: nothing is looked up by name."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
            from transformers.utils import logging
        except ImportError as error:
            raise Unsupported(f"tokenizers are read by transformers: pip install transformers ({error}).") from error
        before = logging.get_verbosity()
        logging.set_verbosity_error()  # remarks on special tokens, which a GGUF spells out
        try:
            if path.suffix == ".gguf":
                # Not AutoTokenizer, which reads all metadata a second time to find this very class.
                return Tokenizer(PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name))
            return Tokenizer(AutoTokenizer.from_pretrained(str(path), local_files_only=True))
        except (OSError, ValueError, KeyError) as error:
            raise BadArgument(f"{path}: its tokenizer cannot be read: {error}") from error
        finally:
            logging.set_verbosity(before)

    @property
    def eos_id(self) -> int | None:
        eos: int | None = self._backend.eos_token_id
        return eos

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, question: str, system: str = "") -> list[int]:
        """A question in the model's chat template, ready to be answered; as it is where there is no template."""
        if not self._backend.chat_template:
            return self.encode(f"{system}\n\n{question}" if system else question)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        text = self._backend.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._backend.encode(text, add_special_tokens=False))


class TextStream:
    """Ids one by one to pieces of text that never need taking back.

    A token may be part of a character, and a decoder may treat the first token of a text in its own way: so a few tokens
    before the new ones are decoded with them, and nothing comes while the text ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._done = 0  # ids from _start are decoded; those before _done are out

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """What was held back."""
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        text = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._done = len(self._ids)
        return text[len(before) :]
