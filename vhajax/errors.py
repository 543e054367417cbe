"""The exceptions that mean: the person can fix this; and exit statuses.

0: done. 2: bad usage or input. 130: interrupted by Ctrl-C. For launchers, which start the same
command again: 75, stopped by SIGTERM with everything saved; 76, another process is lost.
"""

INTERRUPTED = 130
PREEMPTED = 75


class UserError(Exception):
    """Bad flag, configuration, file, checkpoint or prompt.

    The message is one sentence that names the thing, its value and the fix. The command line prints
    it without a traceback and exits with `status`.
    """

    status = 2


class PeerLostError(UserError):
    """Another process of the run is missing, dead or stuck; the same command goes on."""

    status = 76
