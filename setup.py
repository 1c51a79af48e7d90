"""The native recorder and runner: optional parts of the build. Everything else stands in pyproject.toml.

`pip install` builds them in an environment of its own, against the newest torch that the package takes,
which is also the one that it installs. Against the torch that is there already: `pip install
--no-build-isolation`, or in place `python setup.py build_ext --inplace`. Without a compiler the install
goes on without them.
"""

from __future__ import annotations

import os
import sys
from glob import glob

from setuptools import setup

EXTENSIONS = {
    "lazystep.record._recorder": "lazystep/record/src/unity.cpp",
    "lazystep.execute._library": "lazystep/execute/library.cpp",
}


def native() -> dict[str, object]:
    """The extensions, built if torch and a compiler are there; without them the install goes on."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except Exception as error:  # a torch that is broken here may still work where the package is used
        if "build_ext" in sys.argv:
            raise
        print(f"lazystep: no native recorder ({error}); the Python one will be used", file=sys.stderr)
        return {}

    class OptionalBuild(BuildExtension):
        """Compiles the extensions; a failure leaves the Python recorder and says so in one line."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                if self.is_required:
                    raise
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                print(
                    f"lazystep: no native recorder ({reason}); the Python one will be used", file=sys.stderr
                )
                self.extensions = self.distribution.ext_modules = []  # nobody is to look for their files

        # `build_ext --inplace` is how developers ask for it: there a failure is a failure.
        @property
        def is_required(self) -> bool:
            return "build_ext" in sys.argv

    flags = ["-O2", "-g0"]
    if os.environ.get("LAZYSTEP_SANITIZE"):  # `make sanitize`
        flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    extensions = [
        CppExtension(
            name,
            [source],
            depends=sorted(glob(f"{os.path.dirname(source)}/*.[ch]*")),
            extra_compile_args=["-std=c++20", "-Wall", "-fvisibility=hidden", *flags],
            extra_link_args=[flag for flag in flags if flag.startswith("-fsanitize")],
        )
        for name, source in EXTENSIONS.items()
    ]
    return {"ext_modules": extensions, "cmdclass": {"build_ext": OptionalBuild}}


setup(**native())
