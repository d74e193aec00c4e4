"""Text of a growing sequence of tokens, piece by piece."""

from __future__ import annotations

from decode_service.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Releases text as soon as no later token can change it.

    All pieces together are `tokenizer.decode` of all tokens, for any tokens at all. A character whose bytes are spread
    over tokens comes in one piece, when its last byte has come.

    Decoding a token alone is not enough: some decoders strip or insert a space by its place. So the tokens since the
    last decided place are decoded together with those of the piece before, and only what is new is released. The
    library's own `DecodeStream` works alike, but it cannot flush an unfinished end, and it fails on a run of byte
    tokens that begins as text and turns out to be invalid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_length = 0
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes the next token; returns text that is decided now, often none.

        Special and unknown tokens have no text and are ignored.
        """
        if not self._tokenizer.has_text(token_id):
            return ""
        self._pending.append(token_id)
        # A run of byte tokens is valid or invalid as a whole, so it is undecided until another token ends it.
        if self._tokenizer.is_byte(token_id):
            return ""
        piece = self._piece()
        # The end may be half a character; whether it is, the next token shows.
        if piece.endswith(_REPLACEMENT):
            return ""
        self._advance()
        return piece

    def finish(self) -> str:
        """Releases the undecided rest, as `tokenizer.decode` writes it."""
        piece = self._piece()
        self._advance()
        return piece

    def _piece(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)[self._context_length :]

    def _advance(self) -> None:
        """Makes the piece just released the context of the next one."""
        alone = self._tokenizer.decode(self._pending)
        # Without text of its own (a stripped space), a piece cannot stand for the beginning of the sequence.
        if alone:
            self._context, self._context_length = self._pending, len(alone)
        else:
            self._context = self._context + self._pending
            self._context_length = len(self._tokenizer.decode(self._context))
        self._pending = []
