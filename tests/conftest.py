"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts jobs in the background with SIGINT ignored, and programs inherit that; tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
