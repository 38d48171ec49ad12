"""A deadline for downloads, whatever the server does."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

DOWNLOAD_SECONDS = 90  # for one whole download


def within(seconds: float, job: Callable[[], Any]) -> Any:
    """job()'s result or exception; TimeoutError when it is not done after `seconds`.

    A server that sends one byte now and then never trips the timeout of a single read, so the job
    runs in a thread that can be left behind.
    """
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except Exception as error:  # not swallowed: result() raises it
            future.set_exception(error)

    # A daemon, because nothing can end a thread that hangs, and the program must still exit.
    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"not complete after {seconds} s") from None
