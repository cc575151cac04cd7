"""Merges the metrics of several replicas into one page, with the label ``replica``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

_HEADER: Final = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(\{?)")


@dataclasses.dataclass(slots=True)
class _Family:
    headers: list[str] = dataclasses.field(default_factory=list)
    samples: list[str] = dataclasses.field(default_factory=list)


def merged(pages: Mapping[str, str]) -> str:
    families: dict[str, _Family] = {}
    for replica, page in pages.items():
        family = _Family()
        for line in page.splitlines():
            header = _HEADER.match(line)
            if header is not None:
                family = families.setdefault(header[1], _Family())
                if line not in family.headers:
                    family.headers.append(line)
            elif sample := _SAMPLE.match(line):
                end = sample.end(1)
                label = f'{{replica="{replica}"' + ("," if sample[2] else "} ")
                rest = line[end + 1 :]
                family.samples.append(f"{line[:end]}{label}{rest}")
    lines = [line for one in families.values() for line in (*one.headers, *one.samples)]
    return "".join(f"{line}\n" for line in lines)


__all__ = ["merged"]
