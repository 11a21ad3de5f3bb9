"""agent.tools: the zoom request and the cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.tools import MIN_SIDE, zoom, zoom_request


@pytest.mark.parametrize(
    ("reply", "box"),
    [
        ("<zoom>0,0,0.5,0.5</zoom>", (0, 0, 0.5, 0.5)),
        ("<zoom>0.5, 0.5, 0, 0</zoom>", (0, 0, 0.5, 0.5)),
        ("<zoom>-1,0,2,1</zoom>", (0, 0, 1, 1)),
        ("<zoom>0.5,0.5,0.5,0.9</zoom>", None),
        ("<zoom>left</zoom>", None),
        ("<answer>3</answer>", None),
    ],
)
def test_request(reply, box):
    assert zoom_request(reply) == box


@given(st.text(max_size=80))
def test_any_text_is_a_request_or_none(text):
    found = zoom_request(f"<zoom>{text}</zoom>")
    assert found is None or (0 <= found[0] < found[2] <= 1 and 0 <= found[1] < found[3] <= 1)


@given(st.integers(1, 60), st.integers(1, 60), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_the_cut_always_has_pixels(width, height, numbers):
    box = zoom_request(f"<zoom>{','.join(f'{n:.3f}' for n in numbers)}</zoom>")
    if box is not None:
        part = zoom(Image.new("RGB", (width, height)), box)
        assert part.width >= MIN_SIDE and part.height >= MIN_SIDE


def test_the_asked_quarter_is_shown():
    image = Image.new("RGB", (64, 64), "white")
    image.paste((255, 0, 0), (32, 32, 64, 64))
    assert zoom(image, (0.5, 0.5, 1, 1)).getpixel((30, 30)) == (255, 0, 0)
