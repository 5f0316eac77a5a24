"""Streaming detokenization: whole characters only, up to a stop string."""

from collections.abc import Sequence

from bmburst.data.tokenizer import Tokenizer
from bmburst.errors import UserError

_UNKNOWN = "\ufffd"  # decoders replace invalid UTF-8 by it, also the bytes of an incomplete character
_UNFINISHED = 3  # maximum bytes of an incomplete character; a token has at least one byte


class TextStream:
    """Text of one row of a batch, returned as soon as no later token can change it.

    Bytes of an incomplete character, and text that may be the start of a stop string, are held back. The cost of a
    token does not depend on the number of tokens before it.

    The concatenated pieces equal `tokenizer.decode` of all tokens, cut before the stop string, with one exception. If a
    run of byte tokens (`<0xE4>`) is not valid UTF-8 as a whole, or encodes U+FFFD itself, `tokenizers` replaces every
    byte of the run; here the characters that were already returned stay.

    Args:
        tokenizer: The tokenizer; None: no text.
        stop: Strings that end the text.

    Raises:
        UserError: There are stop strings but no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        if tokenizer is None and stop:
            raise UserError(
                f"stop: {stop[0]!r} cannot be found in the answer: the model comes without a tokenizer\n"
                "allowed: stop strings with a tokenizer\nfix: add tokenizer.json to its directory, or leave stop out"
            )
        self._pieces: list[str] = []
        self._decoder = None if tokenizer is None else _Decoder(tokenizer)
        self._finder = _StopFinder(tuple(stop))

    @property
    def text(self) -> str | None:
        """All text returned so far; None without a tokenizer."""
        return None if self._decoder is None else "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None. No text is returned after it."""
        return self._finder.found

    def push(self, token: int) -> str:
        """Append the next token and return the text that is now final, which may be empty."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        return self._given(self._finder.push(self._decoder.push(token)))

    def finish(self) -> str:
        """Return the text that was held back. Do not push tokens afterwards."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        return self._given(self._finder.push(self._decoder.finish()) + self._finder.finish())

    def _given(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


class _Decoder:
    """Decodes a window of the last tokens, and returns the characters that were added.

    The window is context (tokens whose text was returned) followed by pending tokens. It starts at the start of a
    character, except within bytes that are not UTF-8. The context is two pieces of text, because decoders drop a
    leading space: a single piece may decode to an empty string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._text = ""  # text of the window
        self._before = ""  # its prefix that was returned
        self._older = self._context = 0  # number of tokens of the first piece of context, and of both pieces

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and self._is_silent(token):
            self._window.pop()
            return ""
        if not text.endswith(_UNKNOWN):
            return self._all(text)
        pending = self._window[self._context :]
        held = _trailing(text)
        if held > _trailing(self._decode(pending)):
            # Byte tokens: if the run ends in an incomplete character, all of it decodes to U+FFFD.
            if len(pending) <= _UNFINISHED:
                self._text = text
                return ""
            text = self._without_context()
        elif not text.startswith(self._before):
            text = self._without_context()
        held = min(_trailing(text), _UNFINISHED)
        if len(pending) <= _UNFINISHED:
            return self._show(text, len(text) - held)
        # More tokens than an incomplete character can have: the first of them are invalid bytes.
        window = pending[-_UNFINISHED:]
        after = self._decode(window)
        held = min(held, _trailing(after))
        piece = self._show(text, len(text) - held)
        self._window, self._text = window, after
        self._older = self._context = 0
        self._before = after[: len(after) - held]
        return piece

    def finish(self) -> str:
        return self._all(self._decode(self._window))

    def _all(self, text: str) -> str:
        """Return all new text of the window; its pending tokens become context."""
        if not text.startswith(self._before):
            text = self._without_context()
        piece = text[len(self._before) :]
        if piece:
            del self._window[: self._older]
            self._older = self._context - self._older
            text = self._decode(self._window)
        self._context = len(self._window)
        self._before = self._text = text
        return piece

    def _show(self, text: str, end: int) -> str:
        piece = text[len(self._before) : end]
        self._text = text
        self._before += piece
        return piece

    def _without_context(self) -> str:
        """Drop the context, whose text was changed by later tokens, and return the text of the pending tokens."""
        del self._window[: self._context]
        self._older, self._context, self._before = 0, 0, ""
        return self._decode(self._window)

    def _is_silent(self, token: int) -> bool:
        """Return whether a token never has text, such as a special token."""
        return self._decode([token]) == "" and self._decode([token, token]) == ""


class _StopFinder:
    """Cuts streamed text before the stop string that ends first, also if it spans several pieces."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if not self._stop or not text:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start]
        end = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _trailing(text: str) -> int:
    """Return the number of U+FFFD at the end of the text."""
    return len(text) - len(text.rstrip(_UNKNOWN))
