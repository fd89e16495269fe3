"""Stretches that Ctrl-C may not cut in two."""
import contextlib
import signal


@contextlib.contextmanager
def deferred():
    """Let Ctrl-C wait until the end of the block. For imports: a NumPy that was interrupted halfway stays broken for
    the rest of the session. In GDB no other thread takes the signal, as its workers block it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
