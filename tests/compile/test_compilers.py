"""What libraries share is compiled once, the rest at the same time. No real compiler runs."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazystep import config
from lazystep.compile import compilers


class Compiler:
    """Writes the file that it is asked for, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.before: Callable[[list[str]], None] = lambda words: None

    def __call__(self, command_line: str, cwd: str) -> None:
        words = shlex.split(command_line)
        self.calls.append(words)
        self.before(words)
        Path(words[words.index("-o") + 1]).write_text("made")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    own = Compiler()
    monkeypatch.setattr(compilers, "_compile", own)
    monkeypatch.setattr(compilers, "_jobs", {})
    monkeypatch.setattr(compilers, "_interfaces", {})
    monkeypatch.setattr(compilers.cpp_builder, "get_compiler_version_info", lambda compiler: "1.0")
    compilers.take_made()
    (tmp_path / "headers").mkdir()
    with config.override(header_dir=str(tmp_path / "headers")):
        yield own


def header(directory: Path) -> str:
    return f"c++ -x c++-header {directory}/headers/a.h -O1 -o {directory}/headers/a.h.gch"


def sources(directory: Path, name: str) -> list[str]:
    """The command lines of a library: wrapper, kernels, linking."""
    text = f"// {name}\n{compilers._interface_text()}\n// the model\n"
    (directory / f"{name}.wrapper.cpp").write_text(text)
    compile_ = f"c++ {{source}} -O1 -include {directory}/headers/a.h -c -o {{target}}"
    paths = [f"{directory}/{name}.{kind}" for kind in ("wrapper", "kernel")]
    lines = [compile_.format(source=f"{path}.cpp", target=f"{path}.o") for path in paths]
    return [*lines, f"c++ {' '.join(f'{path}.o' for path in paths)} -shared -o {directory}/{name}.so"]


def build(directory: Path, name: str) -> None:
    for line in sources(directory, name):
        compilers._run(line, str(directory))


def test_headers_and_interface_are_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    compilers._run(header(tmp_path), str(tmp_path))
    build(tmp_path, "first")
    assert compilers.take_made() == {"headers": 1, "interfaces": 1}
    # A wrapper is compiled without the text that all wrappers share, and linked with the object that has it.
    text = (tmp_path / "first.wrapper.cpp").read_text()
    assert "AOTInductorModelContainerCreate" not in text
    assert "extern template" in text
    assert "// the model" in text
    (link,) = (words for words in compiler.calls if "-shared" in words)
    (interface,) = (word for word in link if "interface-" in word)
    compilers._jobs.clear()  # another process
    compilers._run(header(tmp_path), str(tmp_path))
    build(tmp_path, "second")
    assert compilers.take_made() == {"headers": 0, "interfaces": 0}
    assert interface in compiler.calls[-1]
    assert sum("-x" in words for words in compiler.calls) == 1


def test_wrapper_and_kernels_are_compiled_at_the_same_time(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_pool", lambda: pool)
    meeting = threading.Barrier(2)

    def meet(words: list[str]) -> None:
        if words[-1].endswith((".wrapper.o", ".kernel.o")):
            meeting.wait(60)  # each waits for the other

    compiler.before = meet
    with compilers.concurrent.futures.ThreadPoolExecutor(3) as pool:
        build(tmp_path, "one")
    assert (tmp_path / "one.so").exists()


def test_a_failure_is_raised_where_the_library_is_linked(compiler: Compiler, tmp_path: Path) -> None:
    def fail(words: list[str]) -> None:
        if words[-1].endswith(".kernel.o"):
            raise ArithmeticError("no")

    compiler.before = fail
    with pytest.raises(ArithmeticError, match="no"):
        build(tmp_path, "one")
    assert not (tmp_path / "one.so").exists()


def test_a_header_that_is_not_whole_is_never_found(compiler: Compiler, tmp_path: Path) -> None:
    def end(words: list[str]) -> None:
        Path(words[words.index("-o") + 1]).write_text("half")
        raise KeyboardInterrupt

    compiler.before = end
    compilers._run(header(tmp_path), str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        compilers._jobs[f"{tmp_path}/headers/a.h.gch"].result()
    assert not list((tmp_path / "headers").glob("*.gch"))
    assert compilers.take_made()["headers"] == 0


def test_preparing_compiles_what_is_shared_and_nothing_else(compiler: Compiler, tmp_path: Path) -> None:
    with compilers.preparing():
        compilers._run(header(tmp_path), str(tmp_path))
        build(tmp_path, "never")
        pytest.fail("the build was not ended")
    for job in compilers._jobs.values():
        job.result(60)
    assert compilers.take_made() == {"headers": 1, "interfaces": 1}
    assert len(compiler.calls) == 2


def test_an_unknown_wrapper_is_compiled_as_it_is(
    compiler: Compiler, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(compilers, "_interface_text", lambda: "what another release of torch writes")
    (line, *_) = sources(tmp_path, "one")
    before = (tmp_path / "one.wrapper.cpp").write_text("// a wrapper\n")
    compilers._run(line, str(tmp_path))
    compilers._jobs[f"{tmp_path}/one.wrapper.o"].result(60)
    assert (tmp_path / "one.wrapper.cpp").stat().st_size == before
    assert compilers.take_made()["interfaces"] == 0
