#!/usr/bin/env python3
"""Packs the UCI digits (lines of 64 pixels 0..16 and a label) into optdigits.bin; README.md describes the format.

Usage: pack_digits.py optdigits.tes optdigits.bin      (a .gz input is read as well)
Needs only the standard library, and only whoever wants to remake the file: the build reads the packed file as it is.
"""
import gzip
import struct
import sys


def fnv1a64(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def pack_image(pixels, label):
    if len(pixels) != 64 or not all(0 <= p <= 16 for p in pixels) or not 0 <= label <= 9:
        raise ValueError(f"not a digit: {pixels} {label}")
    bits = 0
    for i, pixel in enumerate(pixels):
        bits |= pixel << (5 * i)
    return bits.to_bytes(40, "little") + bytes([label])


def main(source, target):
    opener = gzip.open if source.endswith(".gz") else open
    with opener(source, "rt") as lines:
        rows = [[int(field) for field in line.split(",")] for line in lines if line.strip()]
    records = b"".join(pack_image(row[:64], row[64]) for row in rows)
    header = struct.pack("<8sIBBBBQ", b"OPTDIGIT", len(rows), 8, 8, 5, 10, fnv1a64(records))
    with open(target, "wb") as out:
        out.write(header + records)


if __name__ == "__main__":
    main(*sys.argv[1:])
