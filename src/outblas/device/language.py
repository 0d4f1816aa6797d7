"""The lock on triton.language: Triton's interpreter patches it for every thread, and nothing may compile meanwhile."""

import threading

lock = threading.Lock()
