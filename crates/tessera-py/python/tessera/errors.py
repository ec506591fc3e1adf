"""What goes wrong, as exceptions with the codes of the command line."""

from __future__ import annotations

from ._native import explain_code

__all__ = ["TesseraError"]


class TesseraError(Exception):
    """A problem with a stable code, the places that it concerns, and what to do about it."""

    def __init__(
        self,
        code: str,
        message: str,
        places: list[tuple[str, str]] | None = None,
        notes: list[str] | None = None,
        hint: str | None = None,
        text: str = "",
        more: tuple[TesseraError, ...] = (),
    ) -> None:
        super().__init__(text or f"{code}: {message}")
        self.code = code
        """Stable code, such as ``T0103``."""
        self.message = message
        """One sentence that says what is wrong."""
        self.places = places or []
        """The places that the problem concerns, the primary one first: a name, and what is there."""
        self.notes = notes or []
        """Further facts."""
        self.hint = hint
        """What to do next."""
        self.more = more
        """Further problems of the same request."""

    def explain(self) -> str:
        """Returns the page of the code, as ``tessera explain`` prints it."""
        return explain_code(self.code) or f"{self.code} has no page."
