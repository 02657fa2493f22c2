"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in a file, a flag or a config; its text is one line naming the place and the mend.

    The command line prints it without a traceback and exits with status 2.
    """
