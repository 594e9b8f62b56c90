# SPDX-License-Identifier: GPL-3.0-or-later
"""Let SGLang's wheel run on a machine without a GPU: with this folder on PYTHONPATH, in every process of it.

SGLang documents its CPU engine for builds with CPU kernels only. Two things keep the published wheel from
starting, and a Llama with torch's own attention needs neither: the kernel package has no CPU build (its
stand-in here raises as soon as a kernel is really called), and torchvision beside a CPU torch lacks the
operators whose schemas it registers.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


class _Kernels(types.ModuleType):
    __version__ = "0.4.10"
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments, **_options):
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU build")

        return missing


def _prepare():
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    kernels = _Kernels("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    sys.modules["sgl_kernel"] = kernels


if importlib.util.find_spec("torch") is not None:
    _prepare()
