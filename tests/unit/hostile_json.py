"""JSON nobody should send: any value, values in the wrong place, and bytes that are no JSON at all."""

import copy
import json

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -1, 0, 1 << 63, 1e308, -0.0, 1e-320]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "\0", "../../etc/passwd", "/dev/zero", "a\nb", "\u2028", "x" * 5000, "goodput", "eesd"]),
)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def _nested(depth):
    value = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


NESTED = st.integers(50, 900).map(_nested)


def _places(value, path=()):
    """Every path into a JSON value, the empty one included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


@st.composite
def mutated(draw, valid):
    """A valid JSON value with one to three places replaced, removed or added to."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        # Short paths first: a table's two hundred numbers would otherwise be nearly all places there are.
        path = draw(st.sampled_from(sorted(_places(value), key=len)[:60]))
        new = draw(ANY | NESTED)
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return new
            if isinstance(value, dict):
                value[draw(st.text(max_size=12))] = new
            continue
        owner = value
        for key in path[:-1]:
            owner = owner[key]
        if draw(st.booleans()) and isinstance(owner, dict):
            del owner[path[-1]]
        else:
            owner[path[-1]] = new
    return value


@st.composite
def damaged(draw, valid: bytes):
    """Valid bytes with some replaced, a part cut out, or cut short."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=9))
            case 1:
                del data[at : at + draw(st.integers(1, 40))]
            case 2:
                del data[at:]
            case 3:
                data[at:at] = draw(st.sampled_from([b"[" * 3000, b"9" * 5000, b"\xff\xfe", b"\0" * 8, b"NaN", b'"']))
    return bytes(data)


def as_bytes(value) -> bytes:
    return json.dumps(value).encode()
