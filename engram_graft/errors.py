"""The two kinds of failure a caller can expect: a wrong input, and a promise that does not hold."""


class UserError(ValueError):
    """A wrong input: the message gives the value, what is allowed and the next step (exit code 2 on the command line)."""


class PromiseError(RuntimeError):
    """A promise of this toolkit that was checked and does not hold (exit code 1 on the command line)."""


def first_line(error: BaseException) -> str:
    """What an error of another library says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
