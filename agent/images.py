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
    except OSError as error:
        raise ImageError(f"image {name}: {error.strerror or error}; check the path in the row") from None
    if not data:
        raise ImageError(f"image {name}: the file is empty; replace it or remove the row")
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
        raise ImageError(f"image {name}: damaged ({error}); replace it or remove the row") from None
    return image


def inside(root: Path, path: str | Path) -> Path:
    """``path`` (relative to ``root`` or absolute) with links resolved; ``ImageError`` if it lies outside ``root``."""
    if "\0" in str(path):
        raise ImageError(f"image {str(path)!r}: a file name cannot hold a NUL character; check the path in the row")
    real, base = (root / path).resolve(), root.resolve()
    if not real.is_relative_to(base):
        raise ImageError(f"image {path}: outside the data root {base}; move it there or choose another data root")
    return real


class ImageStore:
    """A folder of normalised pictures.

    ``root`` must need no quoting as an address: the engine unquotes ``file://`` references and the trainer does not, so
    a blank or a "%" in the path would make them read different files. Raises ``InputError`` otherwise.
    """

    def __init__(self, root: str | Path, max_pixels: int = MAX_PIXELS) -> None:
        self.root = Path(root).resolve()
        self.max_pixels = max_pixels
        if self.root.as_uri() != f"file://{self.root}":
            raise InputError(
                f"image store {self.root}: the path has characters that a file:// address must quote; "
                "choose a run directory with letters, digits, '-', '_', '.' alone"
            )
        self.root.mkdir(parents=True, exist_ok=True)

    def put(self, source: Image.Image | str | Path | bytes, name: str | None = None) -> str:
        """Normalise ``source``, write it once, and return its ``file://`` reference."""
        image = source if isinstance(source, Image.Image) else open_image(source, name)
        image = normalise(image, self.max_pixels)
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

    def open(self, reference: str) -> Image.Image:
        """Decode a stored picture as engine and trainer do."""
        return open_image(self.path(reference)).convert("RGB")


class InlineImages:
    """The same normalisation without a folder: pictures travel as ``data:`` references (for a remote endpoint)."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self.max_pixels = max_pixels

    def put(self, source: Image.Image | str | Path | bytes, name: str | None = None) -> str:
        """Normalise ``source`` and return it as a ``data:image/png`` reference."""
        image = source if isinstance(source, Image.Image) else open_image(source, name)
        buffer = BytesIO()
        normalise(image, self.max_pixels).save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    def path(self, reference: str) -> str:
        """``reference`` itself if it is one of ``put``'s; ``ImageError`` otherwise."""
        if not reference.startswith("data:image/png;base64,"):
            raise ImageError(f"image {reference[:80]}: only inline pictures are sent here")
        return reference

    def open(self, reference: str) -> Image.Image:
        """Decode an inline picture."""
        return open_image(base64.b64decode(self.path(reference).partition(",")[2])).convert("RGB")
