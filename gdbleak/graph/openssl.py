"""OpenSSL's objects by their structure, as measured on 3.0.19, a stripped library; other releases are not measured."""
from __future__ import annotations

import numpy as np

from ..target.layout import struct
from ..target.target import Target

LEAST_SIZE = 1024               # bytes of SSL (7608 of them) and SSL_CTX (1624)
# The protocols' numbers: SSL 3 to TLS 1.3, DTLS 1.0 and 1.2 and before, and those of methods for any TLS or DTLS.
VERSIONS = (0x300, 0x301, 0x302, 0x303, 0x304, 0xfeff, 0xfefd, 0x100, 0x10000, 0x1ffff)
_METHOD = struct(64, version=(0, "u4"), functions=(16, "(6,)u8"))
# An X509: version, serial number (an ASN1_INTEGER), algorithm, issuer, times, subject and key; later its signature.
_X509 = struct(160, algorithm=(32, "u8"), issuer=(48, "u8"), before=(56, "u8"), after=(64, "u8"), subject=(72, "u8"),
               key=(80, "u8"), signature_type=(156, "u4"))
_STRING = struct(8, length=(0, "u4"), type=(4, "u4"))                # how an ASN1_STRING begins
_UTC_TIME, _GENERALIZED_TIME, _BIT_STRING = 23, 24, 3                # V_ASN1_...


def are_methods(target: Target, words: np.ndarray) -> np.ndarray:
    """Which addresses (uint64) are those of an SSL_METHOD: a version, and functions of the same module."""
    methods, present = target.space.gather(words, _METHOD)
    good = present & np.isin(methods["version"], VERSIONS)
    for k in np.flatnonzero(good).tolist():
        module = target.module_at(int(words[k]))
        places = [target.mapping_at(int(function)) for function in methods["functions"][k]]
        good[k] = module is not None and all(
            place and "x" in place.perms and module.start <= place.start < module.end for place in places)
    return good


def are_certificates(target: Target, address: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Which blocks are an X509, among those whose second word is the length and type of an ASN1_INTEGER."""
    gather = target.space.gather
    rows, present = gather(address, _X509)
    good = present & (size > np.uint64(_X509.itemsize)) & (rows["signature_type"] == _BIT_STRING)
    for name in ("algorithm", "issuer", "subject", "key"):
        _, there = gather(rows[name], np.uint64)
        good &= there
    for name in ("before", "after"):
        times, there = gather(rows[name], _STRING)
        good &= there & (np.isin(times["type"], (_UTC_TIME, _GENERALIZED_TIME)) | (times["length"] == 0))
    return good
