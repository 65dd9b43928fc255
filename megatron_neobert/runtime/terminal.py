"""The console of rich, but for what it does when nobody reads it any more."""

from rich.console import Console


class Terminal(Console):
    """Leaves a closed pipe to `run_command`, which ends with 141; rich would end with 1, as after an error."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles a BrokenPipeError."""
        raise  # noqa: PLE0704 (rich is handling it)
