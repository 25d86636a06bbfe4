"""Changes bytes and tokens of a file: what a bad cable, a bad editor or a bad neighbour might make of it."""
import re

NUMBERS = [b"0", b"-1", b"1", b"2", b"3", b"1e308", b"-1e308", b"1e-320", b".nan", b".inf", b"NaN", b"Infinity", b"1e999",
           b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775808", b"4294967296",
           b"0.5", b"1000000000", b"0x10", b"1_000", b"007", b"true", b"null", b"\"7\"", b"[]", b"{}", b"[1]"]
TEXTS = [b"", b"\"\"", b"null", b"~", b"true", b"x" * 5000, b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\x1b[2J", b"../../etc",
         b"/dev/zero", b"/", b".", b"-", b"[[[[[[[[", b"{a: {b: {c: {", b"!!python/object:os.system", b"&a [*a]", b"*nobody",
         b"%s%n", b"'", b"\"", b"\\", b"\xe2\x80\xae", b"<script>", b"---\n", b"...\n", b"\t"]
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_.-]*")


def replaced(data, begin, end, by):
    return data[:begin] + by + data[end:]


def span(r, data, longest=64):
    begin = r.randrange(len(data) + 1)
    return begin, min(len(data), begin + r.randint(1, longest))


def flip_bit(r, data):
    at = r.randrange(len(data))
    return replaced(data, at, at + 1, bytes([data[at] ^ 1 << r.randrange(8)]))


def set_byte(r, data):
    at = r.randrange(len(data))
    return replaced(data, at, at + 1, bytes([r.choice([0, 10, 32, 34, 44, 58, 91, 93, 123, 125, 127, 128, 255])]))


def drop(r, data):
    return replaced(data, *span(r, data), b"")


def truncate(r, data):
    return data[:r.randrange(len(data))]


def double(r, data):
    begin, end = span(r, data, 400)
    return replaced(data, end, end, data[begin:end] * r.choice([1, 1, 2, 50]))


def move(r, data):
    begin, end = span(r, data)
    to = r.randrange(len(data) + 1)
    return replaced(data, to, to, data[begin:end])


def insert(r, data):
    at = r.randrange(len(data) + 1)
    return replaced(data, at, at, r.choice(TEXTS + [bytes(r.randrange(256) for _ in range(8))]))


def of_matches(pattern, choices):
    def change(r, data):
        found = list(pattern.finditer(data))
        if not found:
            return insert(r, data)
        match = r.choice(found)
        return replaced(data, *match.span(), r.choice(choices))
    return change


def swap_words(r, data):
    found = list(WORD.finditer(data))
    if len(found) < 2:
        return insert(r, data)
    a, b = sorted(r.sample(found, 2), key=lambda m: m.start())
    return data[:a.start()] + b[0] + data[a.end():b.start()] + a[0] + data[b.end():]


def change_line(r, data):
    """Drops, doubles, or moves a line: keys come twice, or not at all."""
    lines = data.split(b"\n")
    at = r.randrange(len(lines))
    line = lines.pop(at)
    for _ in range(r.choice([0, 2, 1])):
        lines.insert(r.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


BYTES = [flip_bit, set_byte, drop, truncate, double, move, insert]
TOKENS = [of_matches(NUMBER, NUMBERS), of_matches(NUMBER, NUMBERS), of_matches(WORD, TEXTS), swap_words, change_line]


def mutated(r, data):
    """One to three changes, of bytes or of tokens."""
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        data = r.choice(r.choice([BYTES, TOKENS]))(r, data) if data else insert(r, data)
    return data
