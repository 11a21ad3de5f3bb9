"""The image store: each picture is normalised once, so that engine and trainer decode the same pixels.

What differs between decoders is settled when a picture enters the store: EXIF orientation is applied (vLLM
does that from 0.24 on, Agent Lightning 1.0.2's trainer never), transparency is laid onto white (the trainer alone would
make it black), the mode is RGB, and pictures over the size limit
are shrunk here and nowhere else. The file is a PNG named by its pixels; its reference is a plain ``file://`` address.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import warnings
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps, UnidentifiedImageError

from agent.errors import InputError

MAX_PIXELS = 1024 * 1024  # what is kept; larger pictures are shrunk to it
MAX_SOURCE_PIXELS = 100_000_000  # what is opened at all; more is refused before it is decoded
MAX_ASPECT = 200  # one side over the other; the image processors of the Qwen-VL family refuse more


class ImageError(InputError):
    """A picture that cannot be used; the message names the file and what to do."""


def normalise(image: Image.Image, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Upright, on white, RGB, at most ``max_pixels``; the aspect ratio is kept to within a pixel."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    elif image.mode.startswith("I;16") or image.mode in ("I", "F"):  # 16 bits a pixel: keep the high ones
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    image = image.convert("RGB")
    width, height = image.size
    if width * height > max_pixels:
        scale = (max_pixels / (width * height)) ** 0.5
        image = image.resize((max(1, int(width * scale)), max(1, int(height * scale))), Image.Resampling.LANCZOS)
    return image


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open and fully decode one picture from a file or bytes.

    Raises ``ImageError`` if it is missing, empty, no picture, cut short, or over ``MAX_SOURCE_PIXELS``.
    """
    name = name or (str(source) if not isinstance(source, bytes) else "image")
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path at all (a NUL character)
        raise ImageError(f"image {name}: {getattr(error, 'strerror', None) or error}; check the path") from None
    if not data:
        raise ImageError(f"image {name}: the file is empty; replace it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data))
            if image.width * image.height > MAX_SOURCE_PIXELS:
                raise ImageError(
                    f"image {name}: {image.width} x {image.height} px is over {MAX_SOURCE_PIXELS:,} px; shrink it first"
                )
            image.load()
    except UnidentifiedImageError:
        raise ImageError(f"image {name}: not a picture that Pillow can read; convert it to PNG or JPEG") from None
    except Image.DecompressionBombError:  # Pillow's own limit, found before the size could be read
        raise ImageError(f"image {name}: it is over {MAX_SOURCE_PIXELS:,} px; shrink it first") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(f"image {name}: damaged ({error}); replace it") from None
    return image


def prepared(source: Image.Image | str | Path | bytes, max_pixels: int, name: str | None) -> Image.Image:
    """Opened if it is no picture yet, and normalised. Raises ``ImageError``, also for a picture of extreme shape."""
    image = source if isinstance(source, Image.Image) else open_image(source, name)
    done = normalise(image, max_pixels)
    if max(done.size) > MAX_ASPECT * min(done.size):
        said = name or (str(source) if isinstance(source, str | Path) else "of the task")
        raise ImageError(
            f"image {said}: {image.width} x {image.height} px, one side is over {MAX_ASPECT} times the other, which "
            "vision models refuse; crop it"
        )
    return done


def inside(root: Path, path: str | Path) -> Path:
    """``path`` (relative to ``root`` or absolute) with links resolved; ``ImageError`` if it lies outside ``root``."""
    try:
        base = root.resolve()
        real = (base / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL character, half a letter
        raise ImageError(f"image {str(path)!r}: no path that can be followed ({error}); check the path") from None
    if not real.is_relative_to(base):
        raise ImageError(f"image {path}: outside the data root {base}; move it there or choose another data root")
    return real


def store_root(path: str | Path) -> Path:
    """``path`` with links resolved, as the root of an image store; ``InputError`` if it cannot be one.

    It must need no quoting as an address: the engine unquotes ``file://`` references and the trainer does not, so a
    blank or a "%" in the path would make them read different files.
    """
    try:
        root = Path(path).resolve()
        address = root.as_uri()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"image store {str(path)!r}: no path that can be followed ({error})") from None
    if address != f"file://{root}":
        raise InputError(
            f"image store {root}: the path has characters that a file:// address must quote; "
            "choose a run directory with letters, digits, '-', '_', '.' alone"
        )
    return root


class ImageStore:
    """A folder of normalised pictures; ``InputError`` for a ``root`` that ``store_root`` refuses."""

    def __init__(self, root: str | Path, max_pixels: int = MAX_PIXELS) -> None:
        self.root = store_root(root)
        self.max_pixels = max_pixels
        self.root.mkdir(parents=True, exist_ok=True)

    def put(self, source: Image.Image | str | Path | bytes, name: str | None = None) -> str:
        """Normalise ``source``, write it once, and return its ``file://`` reference."""
        image = prepared(source, self.max_pixels, name)
        digest = hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()[:32]
        path = self.root / f"{digest}.png"
        if not path.exists():
            # written beside and renamed: a reader never sees half a file, two writers write the same one
            handle, scratch = tempfile.mkstemp(dir=self.root, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                image.save(file, "PNG")
            os.chmod(scratch, 0o644)
            os.replace(scratch, path)
        return f"file://{path}"

    def path(self, reference: str) -> Path:
        """The file behind a reference of this store; ``ImageError`` for any other reference."""
        parts = urlsplit(reference)
        if parts.scheme != "file" or parts.netloc or unquote(parts.path) != parts.path:
            raise ImageError(f"image {reference[:80]}: not a reference of the image store {self.root}")
        path = Path(parts.path)
        if path.resolve().parent != self.root:
            raise ImageError(f"image {reference[:80]}: outside the image store {self.root}")
        return path

    def size(self, reference: str) -> tuple[int, int]:
        """Width and height of a stored picture, which is not decoded for that."""
        with Image.open(self.path(reference)) as image:
            return image.size

    def open(self, reference: str) -> Image.Image:
        """Decode a stored picture as engine and trainer do."""
        return open_image(self.path(reference)).convert("RGB")


class InlineImages:
    """The same normalisation without a folder: pictures travel as ``data:`` references (for a remote endpoint)."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self.max_pixels = max_pixels

    def put(self, source: Image.Image | str | Path | bytes, name: str | None = None) -> str:
        """Normalise ``source`` and return it as a ``data:image/png`` reference."""
        buffer = BytesIO()
        prepared(source, self.max_pixels, name).save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    def path(self, reference: str) -> str:
        """``reference`` itself if it is one of ``put``'s; ``ImageError`` otherwise."""
        if not reference.startswith("data:image/png;base64,"):
            raise ImageError(f"image {reference[:80]}: only inline pictures are sent here")
        return reference

    def open(self, reference: str) -> Image.Image:
        """Decode an inline picture."""
        return open_image(base64.b64decode(self.path(reference).partition(",")[2])).convert("RGB")
