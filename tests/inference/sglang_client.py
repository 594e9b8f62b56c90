#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run SGLang's own load generator from its unpacked wheel, without the server's dependencies (torch, CUDA).

Importing the package ``sglang`` pulls in the engine; the client needs a handful of its modules. So the
packages on the way are bare folders, and the server module that it takes one constant from is replaced.
SGLANG_WHEEL names the folder of the unpacked wheel.
"""

import os
import sys
import types

ROOT = os.environ["SGLANG_WHEEL"]


def _bare(name, **names):
    module = types.ModuleType(name)
    module.__path__ = [os.path.join(ROOT, *name.split("."))]
    module.__dict__.update(names)
    sys.modules[name] = module


for package in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    _bare(package)
_bare("datasets", load_dataset=None)  # for the data sets that need a hub
_bare("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")

from sglang.benchmark.serving import cli_main  # noqa: E402

if __name__ == "__main__":
    cli_main()
