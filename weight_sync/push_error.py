"""How a push fails, and which engine a failure blames."""

from __future__ import annotations


class PushError(RuntimeError):
    """A push that failed. Says at which step, in which engine if it was one, and why.

    ``cause`` is the original error while the exception stays in its process; across processes only its text survives.
    """

    def __init__(self, step: str, cause: BaseException | str, engine: str | None = None) -> None:
        self.step = step
        self.cause = cause
        self.engine = engine
        super().__init__(f"weight push failed at {self._where}: {self.reason}")

    @property
    def _where(self) -> str:
        return f"{self.step} in {self.engine}" if self.engine else self.step

    @property
    def reason(self) -> str:
        """The cause in one phrase, with its type where it is an exception."""
        if isinstance(self.cause, str):
            return self.cause
        if isinstance(self.cause, PushError):
            return f"{self.cause._where}: {self.cause.reason}"
        return f"{type(self.cause).__name__}: {self.cause}"

    def __reduce__(self) -> tuple[type[PushError], tuple[str, str, str | None]]:
        # The cause may hold what cannot be pickled (process groups, live tracebacks), and errors travel through Ray.
        return PushError, (self.step, self.reason, self.engine)


def engine_of(error: BaseException | str | None) -> str | None:
    """The name of the engine that an error, or what caused it, blames; ``None`` if it blames none."""
    while isinstance(error, BaseException):
        if name := getattr(error, "engine", None):
            return str(name)
        error = error.__cause__ or getattr(error, "cause", None)
    return None
