"""Put on PYTHONPATH of a run under test: makes its next save slow, or fail for lack of space, while a file says so.

``<run>/slow-save`` makes each file of a checkpoint take 20 s; ``<run>/disk-full`` makes its optimizer file end in the
middle with the error of a full disk.
"""

import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path


def patch(torch):
    original = torch.save

    def save(value, file, *args, **options):
        run = Path(os.environ.get("MMQA_RUN_DIR", "/nowhere"))
        if "global_step_" in str(file) and "optim_" in str(file):
            if (run / "slow-save").exists():
                Path(file).write_bytes(b"half a fi")
                (run / "saving-now").touch()
                time.sleep(20)
            if (run / "disk-full").exists():
                Path(file).write_bytes(b"half a fi")
                raise OSError(28, "No space left on device", str(file))
        return original(value, file, *args, **options)

    torch.save = save


class AfterTorch(MetaPathFinder):
    """Patches torch when a module that comes after it is looked for."""

    def find_spec(self, name, path=None, target=None):
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "save") and name.startswith(("verl", "transformers")):
            sys.meta_path.remove(self)
            patch(torch)


sys.meta_path.insert(0, AfterTorch())
