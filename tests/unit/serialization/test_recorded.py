"""Messages as they were written before: bytes that clients and servers of other versions exchange."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.serialization import decode, encode

PYTHON = 7
"""The byte that names the sender's Python."""


def values() -> dict[str, Any]:
    shared: list[Any] = [1]
    shared.append(shared)
    return {
        "constants": [None, True, False, ..., NotImplemented],
        "numbers and text": [-1, 2**63, 0.5, 1 - 2j, "ü", "\ud800", b"b", bytearray(b"c")],
        "containers": [(1, [2]), {"a": 1, (2, 3): None}, {4}, frozenset({5}), slice(1, None), range(3)],
        "a cycle": shared,
        "tensors": [
            torch.arange(4, dtype=torch.float16).reshape(2, 2), torch.empty(0, 2),
            torch.ones(1, device="meta"), torch.ones(1, dtype=torch.complex64),
            torch.nn.Parameter(torch.zeros(1)), torch.float32, torch.device("cpu"), torch.Size([1, 2]),
            np.arange(2, dtype="<i4"), np.float32(0.5),
        ],
        "objects": [
            datetime.timedelta(1, 2, 3), decimal.Decimal("1.5"), collections.OrderedDict(a=1),
            collections.defaultdict(list, a=[1]), uuid.UUID(int=5), uuid.SafeUUID.safe, torch.Tensor,
        ],
    }  # fmt: skip


RECORDED = {
    "constants": (
        "PEJ!-"
        "0RR9C1^@s6000001poj5000000000000000000000000000000000004FCZG0|W&C0000000000000000000000000000310"
        "006200093000C4000F5000"
    ),
    "numbers and text": (
        "PEJ!-0RR9C3jhEB000003IG5A0RR910{{R31poj55C8xG0000000000000004Fv`V2nh-"
        "c3<n1Y000000000000000000020000000000000000000000000000000000100002000030000400005000060000700008"
        "000090000A00030|NsC0|Ns90000000N_6W000000PsHm00000006)V000020000300001000010000000000004jh!@TXFf"
        "MR0"
    ),
    "containers": (
        "PEJ!-"
        "0RR9C5dZ)H000007XSbN1^@s6000000RR910RR910000000000000004Gs?w5fT#x1qA>F1qluX4F&)J00IC200aO4009610"
        "096100RI300RI30000000000000000000000000000000000000IC200000009610096100IC200RI300aO400jU500sa600"
        "{s901yBG01W^D00{s901f~E015yA01N;C01E&B00{s9015yA015yA00#g700;m800{s901p5F00;m801p5F000000000000R"
        "I300000009610000000jU50000000aO40000000IC200000009610AT"
    ),
    "a cycle": (
        "PEJ!-0RR9C0ssI2000000ssI20RR910000000000000000000000000000004Fv)K0000000031000000003100000000"
    ),
    "tensors": (
        "PEJ!-"
        "0RR9CC;$Ke00000Jpcdz0{{R3000005&!@IL;wH)00000Kmh;%000004Hy_07#I~67a1A}2@VMf4h01X4i*6k00|Wi76J(l7"
        "7i8#2^9_&3IG5A2LJ#72LJ#72LJ#72LJ#72LJ#700000000000ssI20{{R30{{R300000000000000000000000000RR9100"
        "00000000000000RR910000000000000000000000000000000RR910000000000000000RR91000000ssI20000000000000"
        "00000000ssI2000000RR910ssI20{{R31ONa41poj51^@s62LJ#72mk;82><{93IG5ABme*aB>(^bCIA2cCjbBd9RL6T9smF"
        "U7ytkO7ytkO1^@s6ApigXA^-"
        "pY9RL6T9smFU7ytkO7ytkO1^@s69{>OVAOHXW9RL6T9smFU7ytkO82|tP8UO$Q8vp<R8~^|S9RL6T9smFU7ytkO6951J1^@s"
        "66aWAK6#xJL761SM7XSbN7ytkO5&!@I5dZ)H4gdfE4*&oF5C8xG3jhEB3;+NC4FCWD5dZ)H5&!@I5&!@I5&!@IBLDyZ5dZ)H"
        "5dZ)H5dZ)H0ssI2000000RR910000000000000002LJ#70{{R30RR910{{R30RR910{{R30RR910{{R32><{90RR912><{90"
        "{{R31^@s61ONa40{{R30RR912LJ#70{{R3W^8X^bTcwzaCI;|W;8K8X*4opaCLBDa$#*{bY*fgV{dJ6Y-M;hG-GgebY*UHZ*"
        "pyAbYWv~bu?ydZ((#XHe+yg7y$qP00000dm=C*I(s5yba`-"
        "PB03^fI3g?}b7*03Wg<FTG+itrWMOn+UvFk+b7gdMB05_zEHqtxEFv)?I(s5yba`-"
        "PB03^fI3g?}b7*03Wg<FTI9)6vWMOn+UvFk+b7gdMB05_%EHN@&eJmm}B075_WOR9OWg<EvMl&)ZEFyDgVQ^(4I$JSaEFxrK"
        "bYWj_W@d9`baNs)TQM>$F*aR&EFv=^I(s5yba`-"
        "PB03^fI3g?}b7*03Wg<FTI9)6vWMOn+UvFk+b7gdMB05_!HY_qUU41MfG$J~CB4l)VaAhJoB1SPbA}k_vXkl<=B05_#EHYgz"
        "B4lB7VP9`%W^-k9b0RuhGBhkRGF^RrARr(hARr(h0000#000000RR9100000004kL000000000y06+jj"
    ),
    "objects": (
        "PEJ!-"
        "0RR9CAOHXW00000H~;_u1poj5000003jhEBg#Z8m0000000000000004IUmI9vu`L8wDE<01pWT8x9W%4Fww;4;u~%8x92p2"
        "LJ#72LJ#72LJ#72LJ#72LJ#72LJ#70ssI20000000000000000000000000000000ssI20000000000000000RR910ssI200"
        "0000RR910000000000000000ssI2000000RR9100000000000{{R300000000000RR910ssI20{{R31ONa41poj51^@s62LJ"
        "#78~^|S9RL6T3;+NC3;+NC3;+NC3;+NC3;+NC82|tP8UO$Q3;+NC3;+NC3;+NC3;+NC3;+NC7XSbN3jhEB3;+NC3;+NC3;+N"
        "C3;+NC7ytkO5C8xG5dZ)H3;+NC3;+NC3;+NC3;+NC5&!@I3IG5A3jhEB3;+NC4FCWD3;+NC3;+NC3;+NC2mk;82><{94gdfE"
        "4*&oF761SM6951J6aWAK6#xJL6951J6#xJL8vp<R6#xJL9smFU9{>OV00000000001poj5000000RR91000000ssI2000000"
        "{{R3000003;+NC4FCWD2><{90{{R37XSbN0RR914FCWD7XSbN4*&oF0{{R35&!@IbZ>HFXgXA7ZgX#Pb#-"
        "ZEI#Xe0WmQ#4M0Is(WI9z<NknOGbYpL9Y-"
        "M9~X>V?GI%H*LVRdYDWNBk`VPbV@Y;<XEb2@Bkb97^GY;0v?bZKvHb2?9QWMy(?WJGCWbYx{?X>DO_Iz(k-"
        "X>DO_F)lS^VRU75X>DaXbZKp6WMyo0VE"
    ),
}


def without_python(data: bytes) -> bytes:
    return data[:PYTHON] + data[PYTHON + 1 :]


@pytest.mark.parametrize("name", RECORDED)
def test_a_value_is_written_as_ever_and_read_as_what_it_was(name: str) -> None:
    recorded = base64.b85decode(RECORDED[name])
    assert without_python(encode(values()[name])) == without_python(recorded)
    assert without_python(encode(decode(recorded))) == without_python(recorded)
