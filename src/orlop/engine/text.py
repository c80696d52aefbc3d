"""Text at the engine's edge: prompts become token ids, generated ids become text, whole or piece by piece.

In: a tokenizer (or None), text, token ids. Out: ids, text. Never: a step; the engine itself knows ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from orlop.errors import ConfigError


class Text:
    """One model's tokenizer. Special tokens are added to prompts as the tokenizer says, and left out of answers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompt: str) -> list[int]:
        """``ConfigError`` where there is no tokenizer, or the prompt is no text."""
        if self._tokenizer is None:
            raise ConfigError(
                f"found the prompt {prompt[:60]!r}, expected a list of token ids (whole numbers); "
                "the engine has no tokenizer"
            )
        try:
            ids: list[int] = self._tokenizer.encode(prompt).ids
        except TypeError:  # what it says of half a surrogate pair
            raise ConfigError(f"found the prompt {prompt[:60]!r}, expected text that UTF-8 can say") from None
        return ids

    def decode(self, tokens: Sequence[int]) -> str | None:
        """None where there is no tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def pieces(self) -> TextPieces:
        return TextPieces(self._tokenizer)


class TextPieces:
    """The text of one answer as its tokens come. A character that several tokens make comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._told = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` add; empty where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self._told += text
        return text

    def rest(self, text: str | None) -> str:
        """What of the whole ``text`` has not been said: a character that never became complete."""
        return (text or "").removeprefix(self._told)
