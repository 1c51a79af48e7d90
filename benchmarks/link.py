"""Join network namespaces by links of limited rate, so that ranks on one machine communicate slowly.

This needs the right to make namespaces (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN) and the tools `ip` and
`tc`. Otherwise `LinkError` says what is missing. Each end sends through a token bucket filter (`tc tbf`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


class LinkError(Exception):
    """The link could not be made. The message is short enough for a table."""


@dataclass(frozen=True)
class End:
    """One end of a link: the prefix of a command that runs there, its address and its interface."""

    prefix: list[str]
    address: str
    interface: str


LOOPBACK = [End([], "127.0.0.1", "lo"), End([], "127.0.0.1", "lo")]


_TOKEN = "lazystep"  # a namespace's name begins with it, and goes on with the process that has made it


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone. Their links go with them."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"({_TOKEN}(\d+)-\w+)\b", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            with contextlib.suppress(LinkError):
                _run("ip", "netns", "del", found[1])


@contextlib.contextmanager
def limited(gigabits: float, num_ends: int = 2) -> Iterator[list[End]]:
    """Ends that send with this rate each. Two are joined directly, more by a bridge, which limits nothing.

    The `with` block's end removes all of it. What a killed benchmark has left is removed before.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(f"no `{tool}` on this machine")
    _remove_leftovers()
    token = f"{_TOKEN}{os.getpid()}"
    names = [f"{token}-{number}" for number in range(num_ends)]
    interfaces = [f"lz{os.getpid() % 100000}e{number}" for number in range(num_ends)]
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        if num_ends == 2:
            pair = ["type", "veth", "peer", "name", interfaces[1], "netns", names[1]]
            _run("ip", "link", "add", interfaces[0], "netns", names[0], *pair)
        else:
            _join_by_bridge(f"{token}-bridge", names, interfaces, made)
        # 2 ms at full rate. A smaller bucket throttles below the rate, a larger one lets bursts through.
        burst = str(int(gigabits * 1e9 / 8 * 0.002))
        for number, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
            inside = ["ip", "netns", "exec", name]
            _run(*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            limit = ["rate", f"{gigabits:g}gbit", "burst", burst, "latency", "50ms"]
            _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *limit)
        yield [
            End(["ip", "netns", "exec", name], f"10.77.0.{number + 1}", interface)
            for number, (name, interface) in enumerate(zip(names, interfaces, strict=True))
        ]
    finally:
        for name in made:
            with contextlib.suppress(LinkError):
                _run("ip", "netns", "del", name)


def _join_by_bridge(bridge: str, names: list[str], interfaces: list[str], made: list[str]) -> None:
    _run("ip", "netns", "add", bridge)
    made.append(bridge)
    inside = ["ip", "netns", "exec", bridge]
    _run(*inside, "ip", "link", "add", "br0", "type", "bridge")
    _run(*inside, "ip", "link", "set", "br0", "up")
    for number, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
        pair = ["type", "veth", "peer", "name", interface, "netns", name]
        _run("ip", "link", "add", f"port{number}", "netns", bridge, *pair)
        _run(*inside, "ip", "link", "set", f"port{number}", "master", "br0")
        _run(*inside, "ip", "link", "set", f"port{number}", "up")
