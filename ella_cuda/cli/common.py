"""What all commands share: exit codes and wrong usage."""

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """Options that do not fit together."""
