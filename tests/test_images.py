"""agent.images: one normalisation, content names, references that engine and trainer read alike."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agent.errors import InputError
from agent.images import ImageError, ImageStore, inside, normalise, open_image


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_exif_orientation_is_applied_once(tmp_path):
    image = Image.new("RGB", (40, 20), "white")
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to show it upright
    store = ImageStore(tmp_path / "store")
    stored = store.open(store.put(encoded(image, "JPEG", exif=exif, quality=100, subsampling=0)))
    assert stored.size == (20, 40)
    assert stored.getexif().get(0x0112) is None
    red, green, _ = stored.getpixel((19, 0))
    assert red > 200 and green < 160


def test_transparency_is_laid_onto_white():
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (10, 20, 30, 255))
    done = normalise(image)
    assert done.mode == "RGB" and done.getpixel((0, 0)) == (255, 255, 255) and done.getpixel((1, 1)) == (10, 20, 30)


def test_transparent_palette_and_sixteen_bit_grey():
    palette = Image.new("P", (4, 4), 0)
    palette.info["transparency"] = 0
    assert normalise(palette).getpixel((0, 0)) == (255, 255, 255)
    deep = Image.new("I;16", (2, 2), 65535)
    assert normalise(deep).getpixel((0, 0)) == (255, 255, 255)
    assert normalise(Image.new("I;16", (2, 2), 32768)).getpixel((0, 0)) == (128, 128, 128)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F"]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 10_000),
)
def test_every_mode_becomes_rgb_within_the_limit(mode, width, height, limit):
    done = normalise(Image.new(mode, (width, height)), limit)
    assert done.mode == "RGB" and done.width >= 1 and done.height >= 1
    assert done.width * done.height <= max(limit, done.width, done.height)
    if width * height <= limit:
        assert done.size == (width, height)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.binary(min_size=3, max_size=3))
def test_the_store_gives_back_the_pixels_it_was_given(tmp_path_factory, width, height, colour):
    store = ImageStore(tmp_path_factory.mktemp("s"))
    image = Image.new("RGB", (width, height), tuple(colour))
    reference = store.put(image)
    assert reference == store.put(image.copy()), "the same pixels have one name"
    assert store.open(reference).tobytes() == image.tobytes()
    assert len(list(store.root.iterdir())) == 1


def test_same_bytes_of_another_shape_have_another_name(tmp_path):
    store = ImageStore(tmp_path)
    assert store.put(Image.new("RGB", (2, 8))) != store.put(Image.new("RGB", (8, 2)))


@pytest.mark.parametrize("data", [b"", b"not a picture", encoded(Image.new("RGB", (64, 64), "red"))[:60]])
def test_unusable_bytes_are_named(data, tmp_path):
    file = tmp_path / "photo.png"
    file.write_bytes(data)
    with pytest.raises(ImageError, match=r"photo\.png"):
        open_image(file)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"gone\.jpg.*No such file"):
        open_image(tmp_path / "gone.jpg")


@pytest.mark.parametrize("side", [(20_000, 10_000), (15_000, 10_000)])
def test_two_hundred_megapixels_are_refused_before_decoding(tmp_path, side):
    file = tmp_path / "bomb.png"
    Image.new("1", side).save(file)
    with pytest.raises(ImageError, match=r"bomb\.png: .* is over 100,000,000 px"):
        open_image(file)


def test_references_outside_the_store_are_refused(tmp_path):
    store = ImageStore(tmp_path / "store")
    secret = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(secret)
    (store.root / "link.png").symlink_to(secret)
    good = store.put(Image.new("RGB", (4, 4)))
    assert store.path(good).exists()
    for reference in (
        f"file://{secret}",
        f"file://{store.root}/../secret.png",
        f"file://{store.root}/link.png",
        f"file://host{store.root}/x.png",
        f"file://{store.root}/%2e%2e/secret.png",
        "http://127.0.0.1/x.png",
        "/etc/passwd",
    ):
        with pytest.raises(ImageError):
            store.path(reference)


def test_data_root_is_not_left_through_links_or_dots(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "out.png").write_bytes(b"x")
    (root / "link.png").symlink_to(tmp_path / "out.png")
    (root / "in.png").write_bytes(b"x")
    assert inside(root, "in.png") == root.resolve() / "in.png"
    for path in ("../out.png", "link.png", tmp_path / "out.png"):
        with pytest.raises(ImageError, match="outside the data root"):
            inside(root, path)


def test_a_store_path_that_needs_quoting_is_refused(tmp_path):
    with pytest.raises(InputError, match="must quote"):
        ImageStore(tmp_path / "my run")
