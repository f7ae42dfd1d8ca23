"""Signatures of control messages, with a key that the ranks of one job share.

The launcher puts a new key into the environment of its ranks; on several machines the batch script does. A
message from outside the job, a repeated message, or one from another rank than it claims is then rejected.
Nothing else that ranks exchange is signed: anyone who can write to a process group's sockets can still change
tensors.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from hashlib import sha256

KEY = "STRETTO_JOB_KEY"
SIZE = 32  # bytes of a signature


def job_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of this job, or empty bytes if none is set; signatures then detect only accidents."""
    return environment.get(KEY, "").encode()


def signature(key: bytes, rank: int, number: int, body: bytes) -> bytes:
    """Return the signature of a rank's message with this sequence number, `SIZE` bytes: HMAC (RFC 2104) with
    SHA-256.
    """
    head = f"{rank} {number} {len(body)} ".encode()
    return hmac.new(key, head + body, sha256).digest()


def is_genuine(key: bytes, rank: int, number: int, signed: bytes) -> bool:
    """True if the bytes are a body preceded by its valid signature."""
    return hmac.compare_digest(signed[:SIZE], signature(key, rank, number, signed[SIZE:]))
