# SPDX-License-Identifier: Apache-2.0
"""The C ABI of ``include/hubkv/hubkv.h`` in ctypes: structs and prototypes, with the header's names and order."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p

ABI_VERSION = 1

OK, INVALID_ARGUMENT, NOT_SUPPORTED, CUDA_ERROR, INTERNAL_ERROR = range(5)
CPU, CUDA = range(2)
FLOAT32, FLOAT16, BFLOAT16 = range(3)
SCORE_VANILLA, SCORE_SNAPKV, SCORE_RKV = range(3)
LEVELS = 32


class RefineParams(ctypes.Structure):
    """hubkv_refine_params"""

    _fields_ = [
        ("L", c_int64),
        ("Hkv", c_int64),
        ("T", c_int64),
        ("nmsKernel", c_int32),
        ("penaltyFactor", c_float),
        ("headWeightTemperature", c_float),
        ("minHeadWeight", c_float),
        ("maxHeadWeight", c_float),
        ("sinkTokens", c_int32),
    ]


class SelectParams(ctypes.Structure):
    """hubkv_select_params"""

    _fields_ = [("S", c_int64), ("H", c_int64), ("T", c_int64), ("K", c_int64)]


class CompactParams(ctypes.Structure):
    """hubkv_compact_params"""

    _fields_ = [
        ("L", c_int64),
        ("Hkv", c_int64),
        ("T", c_int64),
        ("D", c_int64),
        ("K", c_int64),
        ("dtype", c_int32),
        ("kHeadStride", c_int64),
        ("kTokenStride", c_int64),
        ("vHeadStride", c_int64),
        ("vTokenStride", c_int64),
    ]


class CacheParams(ctypes.Structure):
    """hubkv_cache_params"""

    _fields_ = [
        ("B", c_int64),
        ("L", c_int64),
        ("Hkv", c_int64),
        ("D", c_int64),
        ("dtype", c_int32),
        ("P", c_int64),
        ("maxPages", c_int64),
        ("pageBase", c_int64),
        ("capacity", c_int64),
    ]


class AttendParams(ctypes.Structure):
    """hubkv_attend_params"""

    _fields_ = [
        ("cache", CacheParams),
        ("Tq", c_int64),
        ("Hq", c_int64),
        ("layer", c_int64),
        ("scale", c_float),
        ("qTokenStride", c_int64),
        ("kTokenStride", c_int64),
        ("vTokenStride", c_int64),
    ]


class CandidatesParams(ctypes.Structure):
    """hubkv_candidates_params"""

    _fields_ = [
        ("cache", CacheParams),
        ("K", c_int64),
        ("tailTokens", c_int64),
        ("tailBase", c_int64),
        ("sinkTokens", c_int32),
    ]


class ScoreWindowParams(ctypes.Structure):
    """hubkv_score_window_params"""

    _fields_ = [
        ("candidates", CandidatesParams),
        ("W", c_int64),
        ("Hq", c_int64),
        ("score", c_int32),
        ("poolKernel", c_int32),
        ("mix", c_float),
        ("scale", c_float),
    ]


class HeldOutLossParams(ctypes.Structure):
    """hubkv_held_out_loss_params"""

    _fields_ = [
        ("candidates", CandidatesParams),
        ("W", c_int64),
        ("Hq", c_int64),
        ("tailLength", c_int64),
        ("scale", c_float),
    ]


class CalibrateTopPParams(ctypes.Structure):
    """hubkv_calibrate_top_p_params"""

    _fields_ = [
        ("L", c_int64),
        ("Hkv", c_int64),
        ("N", c_int64),
        ("p", c_float),
        ("sinkTokens", c_int32),
        ("minRows", c_int64),
        ("maxRows", c_int64),
        ("layerRows", c_int64),
        ("fill", c_int32),
    ]


class SelectRaggedParams(ctypes.Structure):
    """hubkv_select_ragged_params"""

    _fields_ = [("H", c_int64), ("N", c_int64), ("K", c_int64), ("sinkTokens", c_int32)]


class RewriteParams(ctypes.Structure):
    """hubkv_rewrite_params"""

    _fields_ = [("candidates", CandidatesParams), ("keptRows", c_int64), ("mergedRows", c_int64)]


_DEVICE_AND_STREAM = (c_int32, c_void_p)
_WORKSPACE = (c_void_p, c_int64)
_BYTES = (POINTER(c_int64),)

PROTOTYPES: dict[str, tuple[type, tuple[type, ...]]] = {
    "hubkv_abi_version": (c_int32, ()),
    "hubkv_version": (c_char_p, ()),
    "hubkv_last_error": (c_char_p, ()),
    "hubkv_check_environment": (c_int32, ()),
    "hubkv_has_cuda": (c_int32, ()),
    "hubkv_cpu_isa": (c_char_p, ()),
    "hubkv_num_threads": (c_int32, ()),
    "hubkv_set_num_threads": (c_int32, (c_int32,)),
    "hubkv_refine_workspace": (c_int32, (c_int32, POINTER(RefineParams), *_BYTES)),
    "hubkv_refine": (c_int32, (*_DEVICE_AND_STREAM, POINTER(RefineParams), *(c_void_p,) * 5, *_WORKSPACE)),
    "hubkv_select_workspace": (c_int32, (c_int32, POINTER(SelectParams), *_BYTES)),
    "hubkv_select": (c_int32, (*_DEVICE_AND_STREAM, POINTER(SelectParams), *(c_void_p,) * 3, *_WORKSPACE)),
    "hubkv_compact": (c_int32, (*_DEVICE_AND_STREAM, POINTER(CompactParams), *(c_void_p,) * 6)),
    "hubkv_plan": (c_int32, (*_DEVICE_AND_STREAM, POINTER(CacheParams), c_int64, *(c_void_p,) * 4)),
    "hubkv_attend_workspace": (c_int32, (c_int32, POINTER(AttendParams), *_BYTES)),
    "hubkv_attend": (c_int32, (*_DEVICE_AND_STREAM, POINTER(AttendParams), *(c_void_p,) * 11, *_WORKSPACE)),
    "hubkv_append": (c_int32, (*_DEVICE_AND_STREAM, POINTER(CacheParams), c_int64, *(c_void_p,) * 6)),
    "hubkv_score_window_workspace": (c_int32, (c_int32, POINTER(ScoreWindowParams), *_BYTES)),
    "hubkv_score_window": (
        c_int32,
        (*_DEVICE_AND_STREAM, POINTER(ScoreWindowParams), *(c_void_p,) * 9, *_WORKSPACE),
    ),
    "hubkv_held_out_loss_workspace": (c_int32, (c_int32, POINTER(HeldOutLossParams), *_BYTES)),
    "hubkv_held_out_loss": (
        c_int32,
        (*_DEVICE_AND_STREAM, POINTER(HeldOutLossParams), *(c_void_p,) * 8, *_WORKSPACE),
    ),
    "hubkv_calibrate_top_p_workspace": (c_int32, (c_int32, POINTER(CalibrateTopPParams), *_BYTES)),
    "hubkv_calibrate_top_p": (
        c_int32,
        (*_DEVICE_AND_STREAM, POINTER(CalibrateTopPParams), *(c_void_p,) * 7, *_WORKSPACE),
    ),
    "hubkv_select_ragged": (c_int32, (*_DEVICE_AND_STREAM, POINTER(SelectRaggedParams), *(c_void_p,) * 6)),
    "hubkv_rewrite": (c_int32, (*_DEVICE_AND_STREAM, POINTER(RewriteParams), *(c_void_p,) * 10)),
    "hubkv_merge": (c_int32, (*_DEVICE_AND_STREAM, POINTER(RewriteParams), *(c_void_p,) * 11)),
}
"""Function -> result and arguments. Pointers to data are addresses: one call serves host and device memory."""
