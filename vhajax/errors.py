"""The one exception that means: the person can fix this."""


class UserError(Exception):
    """Bad flag, configuration, file, checkpoint or prompt.

    The message is one sentence that names the thing, its value and the fix. The command line prints
    it without a traceback and exits with status 2.
    """
