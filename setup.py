"""The extensions: two in C++, which need torch, and two in C. Everything else stands in pyproject.toml.

`pip install` compiles them in an environment of its own, against the newest torch that pyproject.toml allows.
`pip install --no-build-isolation` compiles them against the torch that is installed already, and `python
setup.py build_ext --inplace` does so in the source tree. One in C++ works with that release of torch alone,
one in C with any.

What a build needs is checked before it starts: pip then shows one line, not a compiler's or a traceback's.
Metadata and source distributions need neither torch nor a compiler.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from typing import Any, NoReturn

from setuptools import Extension, setup

# The module of each extension, and its one source, which may include the files beside it.
EXTENSIONS = {
    "lazystep.record._recorder": "lazystep/record/src/unity.cpp",
    "lazystep.execute._library": "lazystep/execute/library.cpp",
    "lazystep.capture._places": "lazystep/capture/src/places.c",
    "lazystep.capture._witness": "lazystep/capture/src/witness.c",
}
# The one with arithmetic of its own: its loops use vector instructions, and every machine gets the same bits.
LOOPS = {
    "lazystep.execute._library": ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
}
# What the headers of torch 2.14 and later need; those of 2.13 compile with it, too.
STANDARD = "c++20"
# By features: not every compiler that has them gives `__cplusplus` its final value.
SAMPLE = """
#include <compare>
#include <string_view>
struct Flags { bool is_on : 1 = true; };
template <class T> requires(sizeof(T) > 0) constexpr auto order(T a, T b) { return a <=> b; }
constexpr bool starts = std::string_view("lazy").starts_with("la") && order(1, 2) < 0;
"""
COMPILERS = ("g++", "c++", "clang++")
C_STANDARD = "c11"
C_COMPILERS = ("gcc", "cc", "clang")
BUILD_COMMANDS = {"bdist", "bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


def find_compiler() -> str:
    """The command of a C++ compiler that knows the standard: `$CXX`, or the first that is on the PATH."""
    chosen = os.environ.get("CXX")
    found = [name for name in ([chosen] if chosen else COMPILERS) if shutil.which(shlex.split(name)[0])]
    if not found:
        looked_for = f"$CXX = {chosen}" if chosen else f"$CXX, {', '.join(COMPILERS)}"
        refuse(f"a {STANDARD.upper()} compiler, and none was found (looked for {looked_for})")
    command = [*shlex.split(found[0]), f"-std={STANDARD}", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=SAMPLE, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if "error" in line), f"exit status {done.returncode}").strip()
        refuse(f"a {STANDARD.upper()} compiler, and {found[0]} is none ({reason})")
    return found[0]


def find_c_compiler() -> str:
    """The command of a C compiler: `$CC`, the one that Python was built with, or the first on the PATH."""
    chosen = os.environ.get("CC")
    wanted = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", *C_COMPILERS]
    found = [name for name in wanted if shutil.which(shlex.split(name)[0])]
    if not found:
        looked_for = f"$CC = {chosen}" if chosen else f"$CC, {', '.join(C_COMPILERS)}"
        refuse(
            f"a C compiler, and none was found (looked for {looked_for})",
            "Install one (Debian: apt-get install gcc)",
        )
    return found[0]


def refuse(need: str, remedy: str = "Install one (Debian: apt-get install g++)") -> NoReturn:
    """End the build with one line: what it needs, and what to do."""
    # Without a traceback, which is what pip would show last.
    raise SystemExit(
        f"lazystep: building needs {need}. {remedy}, "
        "or install a wheel that `make wheel` has built on another machine."
    )


def extensions() -> dict[str, Any]:
    """The arguments of `setup` that build the extensions."""
    # Both torch and setuptools read the variable: the compiler that was tried is the one that is used.
    os.environ["CXX"] = find_compiler()
    os.environ["CC"] = find_c_compiler()
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        refuse("Python.h, and this Python has none", "Install it (Debian: apt-get install python3-dev)")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        refuse(f"torch, and it can't be imported ({error})", "Install it, or leave --no-build-isolation out")

    class Build(BuildExtension):
        """Compiles the extensions beside each other: ninja, which would do one by one, is of no use."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, use_ninja=False)

        def finalize_options(self) -> None:
            super().finalize_options()
            self.parallel = self.parallel or True
            self.force = True  # time stamps do not tell for which torch the files of an earlier build are

    flags = ["-O2", "-g0"]
    if os.environ.get("LAZYSTEP_SANITIZE"):  # `make sanitize`
        flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    shared = ["-Wall", "-fvisibility=hidden", *flags]
    link_flags = [flag for flag in flags if flag.startswith("-fsanitize")]
    modules = [
        # With a standard of its own: without one, torch adds that of C++.
        Extension(
            name,
            [source],
            extra_compile_args=[f"-std={C_STANDARD}", "-Wextra", *shared],
            extra_link_args=link_flags,
        )
        if source.endswith(".c")
        else CppExtension(
            name,
            [source],
            extra_compile_args=[f"-std={STANDARD}", *shared, *LOOPS.get(name, ())],
            extra_link_args=link_flags,
        )
        for name, source in EXTENSIONS.items()
    ]
    return {"ext_modules": modules, "cmdclass": {"build_ext": Build}}


setup(**(extensions() if BUILD_COMMANDS.intersection(sys.argv) else {}))
