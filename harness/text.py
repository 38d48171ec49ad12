"""The text that users hand in: one rule for encodings and line breaks, wherever it comes from.

Text is UTF-8, with or without a byte order mark. A line ends in a newline: the carriage returns of
Windows (CRLF) and of old Macs (CR) become newlines.
"""

import shlex
import sys
from pathlib import Path

STDIN = "-"  # the file name that stands for standard input
MARKS = {  # byte order marks; UTF-32's begins with UTF-16's, so it comes first
    "UTF-32LE": b"\xff\xfe\0\0",
    "UTF-32BE": b"\0\0\xfe\xff",
    "UTF-16LE": b"\xff\xfe",
    "UTF-16BE": b"\xfe\xff",
}


def unix_newlines(text: str) -> tuple[str, int]:
    """The text with a newline for each CRLF and each lone CR, and how many there were."""
    n_changed = text.count("\r")  # a CRLF has one, a lone CR is one
    if not n_changed:
        return text, 0
    return text.replace("\r\n", "\n").replace("\r", "\n"), n_changed


def decode_text(content: bytes, file: str) -> str:
    """The file's content as UTF-8 text, without a byte order mark, its line breaks as they are.

    ValueError, which names the likely encoding, for anything else. UTF-16 without a mark is valid
    UTF-8 where it is English, with a NUL beside every letter, so text may not hold NULs.
    """
    likely = likely_encoding(content)
    if likely:
        raise ValueError(f"looks like {likely}, not UTF-8; {conversion(likely, file)}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text (at byte {error.start}); {conversion('ENCODING', file)} "
            "(its own encoding; for a file from Windows often CP1252)"
        ) from None
    if "\0" in text:
        at = content.index(0)
        raise ValueError(f"not a text: a NUL character at byte {at}; name a UTF-8 text file")
    return text


def likely_encoding(content: bytes) -> str:
    """The encoding that a byte order mark or the places of the NULs give away, or ''."""
    for name, mark in MARKS.items():
        if content.startswith(mark):
            return name
    # Most characters of most texts have a number below 256, so their other bytes are 0.
    zeros = [content[place::4].count(0) for place in range(4)]
    quarter = len(content) // 4
    filled = [zeros[place] > 0.7 * quarter for place in range(4)]
    patterns = {
        (False, True, True, True): "UTF-32LE",
        (True, True, True, False): "UTF-32BE",
        (False, True, False, True): "UTF-16LE",
        (True, False, True, False): "UTF-16BE",
    }
    return patterns.get(tuple(filled), "") if quarter else ""


def conversion(encoding: str, file: str) -> str:
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(file)} > utf8.txt"
    return f"save it as UTF-8, e.g. by: {command}"


def read_text(file: str) -> str:
    """The text of a file, or of standard input for "-", its line breaks as they are.

    ValueError, which says what is wrong with it but does not name it.
    """
    try:
        if file != STDIN:
            return decode_text(Path(file).read_bytes(), file)
        stdin = getattr(sys.stdin, "buffer", None)
        if stdin is None:
            raise ValueError("there is no standard input here; name a UTF-8 text file")
        return decode_text(stdin.read(), file)
    except OSError as error:
        where = "standard input" if file == STDIN else Path(file).absolute()
        raise ValueError(f"{error.strerror} ({where}); name a UTF-8 text file") from None
