/*
 * SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of libhubkv: the stages that shrink a KV cache, after the prompt and while decoding, and attend over what is
 * left.
 *
 * Letters used in every shape (docs/architecture.md has the whole alphabet):
 *   B sequences   T prompt tokens   Tq new tokens   L layers   Hq query heads   Hkv kv heads   G = Hq / Hkv
 *   D head dim    K kept rows       P tokens per tail page
 *
 * Rules of this header
 *   - Raw pointers only. With HUBKV_CPU every pointer is host memory. With HUBKV_CUDA every pointer to data is device
 *     memory and the call only enqueues work on `stream` (a cudaStream_t); parameter structs and arrays of pointers are
 *     always host memory and are read before the call returns. A call may be captured into a CUDA graph; values in device
 *     memory are read when it runs and are not checked, but cut to what is possible.
 *   - Arrays are dense and row-major in the order of the shape beside them, unless a stride says otherwise. Strides count
 *     elements, offsets into the arena count bytes.
 *   - No stage allocates. A stage with scratch memory has a `_workspace` function that answers the bytes needed for given
 *     parameters; the workspace must be aligned to 64 bytes (256 on CUDA).
 *   - Every function returns a status; hubkv_last_error() has the message of the last failure on the calling thread. It
 *     names the field and the value that was refused. Nothing is written to an output when parameters are refused.
 *   - Functions may be called from any number of threads, with distinct outputs and workspaces.
 */
#ifndef HUBKV_HUBKV_H
#define HUBKV_HUBKV_H

#include <stdint.h>

#if defined(_WIN32)
#define HUBKV_API __declspec(dllexport)
#else
#define HUBKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C"
{
#endif

/* Grows with every incompatible change of this header; the Python package refuses a library of another value. */
#define HUBKV_ABI_VERSION 1

typedef enum
{
    HUBKV_OK = 0,
    HUBKV_INVALID_ARGUMENT = 1, /* a parameter, pointer or size was refused */
    HUBKV_NOT_SUPPORTED = 2,    /* right, but not in this build (for example: not built with CUDA) */
    HUBKV_CUDA_ERROR = 3,       /* the CUDA runtime refused a launch */
    HUBKV_INTERNAL_ERROR = 4    /* a bug in this library */
} hubkv_status;

typedef enum
{
    HUBKV_CPU = 0,
    HUBKV_CUDA = 1
} hubkv_device;

typedef enum
{
    HUBKV_FLOAT32 = 0,
    HUBKV_FLOAT16 = 1,
    HUBKV_BFLOAT16 = 2
} hubkv_dtype;

/* ---- library ------------------------------------------------------------------------------------------------- */

HUBKV_API int32_t hubkv_abi_version(void);
/* "0.1.0" */
HUBKV_API char const* hubkv_version(void);
/* Message of the last failure on this thread; empty when there was none. Valid until the next call on this thread. */
HUBKV_API char const* hubkv_last_error(void);
/* Refuses HUBKV_NUM_THREADS (1..1024) or HUBKV_CPU_ISA (scalar, avx2, avx512) where the environment holds something else;
 * so does every stage with HUBKV_CPU. Both are read once, at the first call; empty is as if not set. */
HUBKV_API hubkv_status hubkv_check_environment(void);
/* 1 when the library holds CUDA kernels. */
HUBKV_API int32_t hubkv_has_cuda(void);
/* "avx512", "avx2" or "scalar": the instructions that the host kernels use. HUBKV_CPU_ISA in the environment lowers it. */
HUBKV_API char const* hubkv_cpu_isa(void);
/* Threads of the host kernels, the caller included. Starts as HUBKV_NUM_THREADS, else the CPUs this process may use. */
HUBKV_API int32_t hubkv_num_threads(void);
HUBKV_API hubkv_status hubkv_set_num_threads(int32_t threads);

/* ---- refine: scores -> refined scores ----------------------------------------------------------------------------
 *
 * For each layer and head, with protected = the first sinkTokens and the last window positions:
 *   hub_i = s_i >= max of s_j over |j - i| <= (nmsKernel - 1) / 2        (NaN counts as -inf; ties are all hubs)
 *   q_i   = hub_i ? s_i : penaltyFactor * s_i
 *   c_h   = std / (mean + 1e-6) over the finite unprotected positions (population std)
 *   beta  = clip((c_h / mean over the layer's heads of c)^headWeightTemperature, minHeadWeight, maxHeadWeight)
 *   z_i   = s_i + alpha * (beta * q_i - s_i)
 *   z_i   = +inf at protected positions
 * beta is 1 where no position is unprotected and finite (such a head has c = 0 in the mean), where the mean of c is 0 or
 * the power is not a number, and where headWeightTemperature is 0.
 * alpha = 0 gives z = s bit for bit; a score that is not finite passes unchanged (protected positions still get +inf).
 *
 * Numbers, so that every backend gives the same bits. Moments are float64 sums of s and s*s over the finite unprotected
 * positions in one fixed order: positions are cut into chunks of 4096; inside a chunk, lane v in 0..127 adds the positions
 * with (i mod 128) = v in ascending order; lanes are folded by lane[v] += lane[v + w] for w = 64, 32, 16, 8, 4, 2, 1; the
 * chunk sums are added in ascending order to the head's total. std = sqrt(max(0, S2/n - (S1/n)^2)). The mean of c adds
 * heads in ascending order. The power is 1 at temperature 0, sqrt(x) at 0.5, sqrt(sqrt(x)) at 0.25, pow otherwise (that one
 * is not bit-equal between libraries). beta is rounded to float32 once; z is float32 arithmetic without contraction, in the
 * order t = beta*q; t = t - s; t = alpha*t; z = s + t.
 */
typedef struct
{
    int64_t L;
    int64_t Hkv;
    int64_t T;
    int32_t nmsKernel;           /* odd, >= 1 */
    float penaltyFactor;         /* gamma, in [0, 1] */
    float headWeightTemperature; /* tau, >= 0 */
    float minHeadWeight;         /* > 0 */
    float maxHeadWeight;         /* >= minHeadWeight */
    int32_t sinkTokens;          /* >= 0 */
} hubkv_refine_params;

HUBKV_API hubkv_status hubkv_refine_workspace(hubkv_device device, hubkv_refine_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_refine(hubkv_device device, void* stream, hubkv_refine_params const* params,
    float const* scores,   /* [L, Hkv, T] */
    float const* alpha,    /* [1] in [0, 1]: compression ratio ^ gate power */
    int32_t const* window, /* [1] >= 0 */
    float* refined,        /* [L, Hkv, T]; must not overlap scores */
    int64_t* nonFinite,    /* [1] how many scores were NaN or infinite; may be null */
    void* workspace, int64_t workspaceBytes);

/* ---- select: refined scores -> the K best of each group -------------------------------------------------------
 *
 * The heads are cut into S groups of H heads that share a budget of K rows each:
 *   model scope S = 1, H = L*Hkv      layer scope S = L, H = Hkv      head scope S = L*Hkv, H = 1
 * Exactly the K largest of a group's H*T values are kept. Equal values: the lower flat index (head, token) wins. NaN ranks
 * as -inf, -0 equals +0. Positions ascend within a head; headOffsets count rows over all groups (the last is S*K).
 */
typedef struct
{
    int64_t S;
    int64_t H;
    int64_t T; /* <= 2^31 - 1 */
    int64_t K; /* 0..H*T */
} hubkv_select_params;

HUBKV_API hubkv_status hubkv_select_workspace(hubkv_device device, hubkv_select_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_select(hubkv_device device, void* stream, hubkv_select_params const* params,
    float const* refined, /* [S, H, T] */
    int32_t* positions,   /* [S*K] */
    int64_t* headOffsets, /* [S*H + 1] */
    void* workspace, int64_t workspaceBytes);

/* ---- compact: copy the kept rows together -----------------------------------------------------------------------
 *
 * Row r of kRows is layer l, head h, token positions[r] of k[l], for headOffsets[l*Hkv + h] <= r < headOffsets[l*Hkv+h+1];
 * bytes are not changed. A position outside 0..T-1 or an offset outside 0..K gives a zero row or none, never a fault.
 */
typedef struct
{
    int64_t L; /* layers in this call */
    int64_t Hkv;
    int64_t T;
    int64_t D; /* a multiple of 8, 8..256 */
    int64_t K; /* rows of kRows and vRows */
    hubkv_dtype dtype;
    int64_t kHeadStride; /* elements between heads and between tokens of every k[l]; D values of a row are contiguous */
    int64_t kTokenStride;
    int64_t vHeadStride;
    int64_t vTokenStride;
} hubkv_compact_params;

HUBKV_API hubkv_status hubkv_compact(hubkv_device device, void* stream, hubkv_compact_params const* params,
    void const* const* k,       /* [L] pointers to [Hkv, T, D] with the strides above */
    void const* const* v,       /* [L] */
    int32_t const* positions,   /* [K] */
    int64_t const* headOffsets, /* [L*Hkv + 1] */
    void* kRows,                /* [K, D] */
    void* vRows);               /* [K, D] */

/* ---- the cache, as plan, attend and append read it ----------------------------------------------------------------
 *
 * arena [2] int64: the address and the bytes of the one block that holds all cache memory.
 * segments [B, 4] int64: byte offsets in the arena of a sequence's compact segment
 *     0: k_rows [K, D]   1: v_rows [K, D]   2: head_offsets int64 [L*Hkv + 1]   3: row_bias float32 [K]
 *     -1 in field 3: no row bias. -1 in field 0, 1 or 2: the sequence has no compact segment.
 * blockTable [B, maxPages] int32: the pages of a sequence's tail; page p lies at pageBase + p * page bytes in the arena and
 *     is [L, 2, Hkv, P, D] (0 = keys, 1 = values). Tail token t is slot t mod P of page blockTable[b][t / P].
 * tailLengths [B] int32: tokens in each tail. newLengths [B] int32: how many of the Tq new tokens of each sequence are real
 *     (the first ones); null means all.
 * Rows and pages are aligned to 16 bytes, head_offsets to 8, row_bias to 4; a segment that is not counts as none.
 * What these tables say is bounded against the arena and the parameters before it is used: wrong tables give wrong numbers
 * or zero rows, never a fault.
 */
typedef struct
{
    int64_t B;
    int64_t L;
    int64_t Hkv;
    int64_t D; /* a multiple of 8, 8..256 */
    hubkv_dtype dtype;
    int64_t P;        /* tokens per page, >= 1 */
    int64_t maxPages; /* columns of blockTable, >= 0 */
    int64_t pageBase; /* bytes, a multiple of 16 */
    int64_t capacity; /* work items per layer that plan may make: >= B * Hkv */
} hubkv_cache_params;

/* ---- plan: the work list of attend -----------------------------------------------------------------------------
 *
 * Cuts the compact rows of every (sequence, head) of each layer into items of at most `rowsPerItem` rows, the smallest
 * number >= minRowsPerItem (a multiple of 16) for which a layer's items fit in capacity. Only compact segments enter: a plan
 * holds until a segment joins or leaves; attend finds tails and new tokens by itself.
 *   work [L, capacity, 4] int32: sequence, kv head, first row within the head, rows
 *   workCount [L] int32
 */
HUBKV_API hubkv_status hubkv_plan(hubkv_device device, void* stream, hubkv_cache_params const* params,
    int64_t minRowsPerItem,  /* >= 1 */
    int64_t const* arena,    /* [2] */
    int64_t const* segments, /* [B, 4] */
    int32_t* work, int32_t* workCount);

/* ---- attend: attention of new tokens over compact segment, tail and new tokens --------------------------------------
 *
 * For sequence b, new token t < newLengths[b], query head h of kv head h / G:
 *   out = softmax(scale * q . k + bias) v over the head's compact rows (bias = row_bias), its tail rows, and the new tokens
 *   0..t (bias = 0), float32 accumulation. Tokens t >= newLengths[b] get zeros. Nothing to attend to gives zeros.
 */
typedef struct
{
    hubkv_cache_params cache;
    int64_t Tq;           /* >= 1 */
    int64_t Hq;           /* G = Hq / Hkv in 1..16 */
    int64_t layer;        /* 0..L-1 */
    float scale;          /* 0 means 1 / sqrt(D) */
    int64_t qTokenStride; /* elements between tokens of q, kNew, vNew; heads are D, sequences Tq tokens apart */
    int64_t kTokenStride;
    int64_t vTokenStride;
} hubkv_attend_params;

/* With Tq <= 32 fewer tokens may need more bytes than many: the rows of a head are then shared out, and the parts merged.
 * Beyond, bytes grow with B * Tq; and with B, maxPages and capacity always. */
HUBKV_API hubkv_status hubkv_attend_workspace(hubkv_device device, hubkv_attend_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_attend(hubkv_device device, void* stream, hubkv_attend_params const* params,
    void const* q,              /* [B, Tq, Hq, D] with qTokenStride */
    void const* kNew,           /* [B, Tq, Hkv, D] with kTokenStride */
    void const* vNew,           /* [B, Tq, Hkv, D] with vTokenStride */
    int64_t const* arena,       /* [2] */
    int64_t const* segments,    /* [B, 4] */
    int32_t const* blockTable,  /* [B, maxPages] */
    int32_t const* tailLengths, /* [B] */
    int32_t const* newLengths,  /* [B] or null */
    int32_t const* work,        /* [L, capacity, 4] from plan */
    int32_t const* workCount,   /* [L] */
    void* out,                  /* [B, Tq, Hq, D], dense */
    void* workspace, int64_t workspaceBytes);

/* ---- append: new rows of all layers into the tails -----------------------------------------------------------------
 *
 * Writes token t < newLengths[b] of sequence b to tail slot tailLengths[b] + t of every layer. tailLengths is not changed: the
 * caller owns it. A slot without a page (beyond maxPages, or a page outside the arena) is not written.
 */
HUBKV_API hubkv_status hubkv_append(hubkv_device device, void* stream, hubkv_cache_params const* params, int64_t Tq,
    void const* kNew,           /* [L, B, Tq, Hkv, D] */
    void const* vNew,           /* [L, B, Tq, Hkv, D] */
    int64_t const* arena,       /* [2] */
    int32_t const* blockTable,  /* [B, maxPages] */
    int32_t const* tailLengths, /* [B] before this call */
    int32_t const* newLengths); /* [B] or null */

/* ---- while decoding: the candidates of a compression ----------------------------------------------------------------
 *
 * The stages below compress one sequence again while it decodes (HARD-KV, arXiv 2606.28831). The candidates of a layer and
 * kv head are the n rows that may be dropped, numbered in this order:
 *   its compact rows, row r at position positions[r] of the text; then
 *   tail tokens 0..tailTokens-1, token t at position tailBase + t.
 * Arrays over all candidates are ragged and packed: head number h = layer * Hkv + kv head has the entries
 * candidateOffsets[h] .. candidateOffsets[h+1]-1, where candidateOffsets[h] = head_offsets[h] + h * tailTokens; there are
 * N = K + L * Hkv * tailTokens. Candidates at positions below sinkTokens are protected: they are always kept.
 */
typedef struct
{
    hubkv_cache_params cache; /* B = 1 */
    int64_t K;                /* rows of the compact segment, 0 where there is none */
    int64_t tailTokens;       /* 0..maxPages * P */
    int64_t tailBase;         /* position of tail token 0; tailBase + tailTokens <= 2^31 - 1 */
    int32_t sinkTokens;       /* >= 0 */
} hubkv_candidates_params;

/* ---- score_window: the last queries against the candidates' keys ---------------------------------------------------
 *
 * With the last W queries of every layer (RoPE applied, at positions behind all candidates), for each head of n candidates:
 *   importance_i = mean over the W * G queries of softmax_i(scale * q . k_i + row_bias_i), a softmax over the n candidates
 *   raw_i = log(importance_i), so that softmax(raw) is the importance
 *   transformed_i, by `score`:
 *     vanilla  raw_i
 *     snapkv   max of raw_j over the poolKernel candidates around i, |j - i| <= (poolKernel - 1) / 2; protected candidates
 *              neither pool nor are pooled (SnapKV, arXiv 2404.14469, pools the attention weights: the logarithm of that)
 *     rkv      log(1e-10 + (s_i - min s) / sum over j of (s_j - min s)), s_i = mix * importance_i - (1 - mix) * redundancy_i,
 *              redundancy = softmax_i(mean over j != i of cosine(k_i, k_j)) (R-KV, arXiv 2505.24133, whose exemption of the
 *              latest of several alike keys is left out: it needs all pairs, the mean only the sum of the unit keys)
 * A candidate whose row is not in the arena has raw = -inf. Neighbours are those in the list of candidates, whatever lies
 * between their positions.
 */
typedef enum
{
    HUBKV_SCORE_VANILLA = 0,
    HUBKV_SCORE_SNAPKV = 1,
    HUBKV_SCORE_RKV = 2
} hubkv_score;

typedef struct
{
    hubkv_candidates_params candidates;
    int64_t W;  /* queries of each query head, 1..256 */
    int64_t Hq; /* G = Hq / Hkv in 1..16 */
    hubkv_score score;
    int32_t poolKernel; /* odd, 1..255 */
    float mix;          /* in [0, 1] */
    float scale;        /* 0 means 1 / sqrt(D) */
} hubkv_score_window_params;

HUBKV_API hubkv_status hubkv_score_window_workspace(
    hubkv_device device, hubkv_score_window_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_score_window(hubkv_device device, void* stream, hubkv_score_window_params const* params,
    void const* q,               /* [L, W, Hq, D] */
    int32_t const* positions,    /* [K] of the compact rows */
    int64_t const* arena,        /* [2] */
    int64_t const* segments,     /* [1, 4] */
    int32_t const* blockTable,   /* [1, maxPages] */
    float* raw,                  /* [N] */
    float* transformed,          /* [N] */
    int32_t* candidatePositions, /* [N] */
    int64_t* candidateOffsets,   /* [L*Hkv + 1] */
    void* workspace, int64_t workspaceBytes);

/* ---- held_out_loss: what a head loses by keeping fewer candidates ----------------------------------------------------
 *
 * How many candidates a head needs is not seen by the queries that chose them: a sharp head's few best hold nearly all mass
 * of the queries that ranked them, and much less of later ones'. So candidates are ranked by earlier queries and judged by W
 * later ones, which had no say (the rule is ours). For each head:
 *   level_i = floor(2 * (max ranking - ranking_i)), the maximum being that of candidates which are not protected; 0..31:
 *             larger numbers, NaN, -inf, and all where the maximum is no finite number, are 31. Protected ones have none.
 *   weight_i = softmax_i(scale * q . k_i + row_bias_i) over all rows that the query sees: the candidates, and tail tokens
 *             tailTokens..tailLength - W + w, for query w of 0..W-1 (RoPE applied), whose own token is the last of these
 *   lost_b  = sum of weight_i over candidates of level b or more
 *   loss[b] = mean over the W * G queries of lost_b ^ 2, for b in 0..31; loss[32] = 0
 *   rows[b] = how many candidates are protected or of a level below b
 * float32 sums. A row that is not in the arena weighs nothing. The square: attention without some rows is that of the others,
 * wrong by lost_b times the distance between the mean values of the two.
 */
#define HUBKV_LEVELS 32

typedef struct
{
    hubkv_candidates_params candidates;
    int64_t W;  /* queries of each query head, 1..256 */
    int64_t Hq; /* G = Hq / Hkv in 1..16 */
    int64_t
        tailLength; /* tokens of the tail: tailTokens + W or more, at most maxPages * P; K + L * Hkv * tailLength <= 2^31 - 1 */
    float scale; /* 0 means 1 / sqrt(D) */
} hubkv_held_out_loss_params;

HUBKV_API hubkv_status hubkv_held_out_loss_workspace(
    hubkv_device device, hubkv_held_out_loss_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_held_out_loss(hubkv_device device, void* stream, hubkv_held_out_loss_params const* params,
    void const* q,                     /* [L, W, Hq, D] */
    float const* ranking,              /* [N] */
    int32_t const* candidatePositions, /* [N] */
    int64_t const* arena,              /* [2] */
    int64_t const* segments,           /* [1, 4] */
    int32_t const* blockTable,         /* [1, maxPages] */
    float* loss,                       /* [L*Hkv, HUBKV_LEVELS + 1] */
    int32_t* rows,                     /* [L*Hkv, HUBKV_LEVELS + 1] */
    void* workspace, int64_t workspaceBytes);

/* ---- calibrate_top_p: how many candidates each head keeps ------------------------------------------------------------
 *
 * Candidates of a head rank: protected ones first, by index; then by value, of equal ones the lower index first; NaN counts
 * as -inf, -0 as +0, +inf as the largest finite number.
 *   weight_i(v, tau) = floor(2^31 * exp((v_i - max v) / tau)), 0 where v_i = -inf
 *   top(v, tau)      = the least number of first ranked candidates, no less than the protected ones, whose weights sum to
 *                      ceil(p * sum of all weights) or more
 *   n*  = top(raw, 1)
 *   tau = the temperature at which the n* first by `transformed` hold mass p: 1 if accepted, else bisected geometrically
 *         between 2^-10 and 2^10, at most 40 times. Accepted is a tau where top(transformed, tau) = n*, or where the mass is
 *         in [p, p + min(0.01, (1 - p) / 10)]. Where none is, the largest tau tried whose mass is >= p, or 2^-10.
 *   n_h = top(transformed, tau), no less than minRows, no more than maxRows (0: no bound), never less than the protected
 * p = 1 keeps all: tau = 1, n_h = n before maxRows.
 *   calibrated_i = weight_i(transformed, tau) / sum of all weights, a float64 quotient rounded once
 * Where the n_h of a layer sum to more than layerRows (0: no bound), or `fill` asks for exactly that many (n_h is then n
 * before maxRows), the layer keeps the layerRows candidates with the largest `calibrated` out of those: one threshold for its
 * heads, which loses the least calibrated mass. Of equal ones the lower head first. Each head keeps its first
 * min(n_h, max(protected, minRows)) in any case, also where these are more than layerRows.
 * The order within a head never changes: the n_h first ranked are kept.
 *
 * Sums are of integers: their order changes nothing, every backend gives the same bits. exp is a fixed sequence of float64
 * operations (calibrate_top_p/weight.h).
 */
typedef struct
{
    int64_t L;
    int64_t Hkv;
    int64_t N;          /* candidates of all heads, <= 2^31 - 1 */
    float p;            /* in (0, 1] */
    int32_t sinkTokens; /* >= 0 */
    int64_t minRows;    /* of a head, >= 0 */
    int64_t maxRows;    /* of a head, 0: no bound */
    int64_t layerRows;  /* of all heads of a layer together, 0: no bound */
    int32_t fill;       /* 0 or 1 */
} hubkv_calibrate_top_p_params;

HUBKV_API hubkv_status hubkv_calibrate_top_p_workspace(
    hubkv_device device, hubkv_calibrate_top_p_params const* params, int64_t* bytes);
HUBKV_API hubkv_status hubkv_calibrate_top_p(hubkv_device device, void* stream,
    hubkv_calibrate_top_p_params const* params, float const* raw, /* [N] */
    float const* transformed,                                     /* [N] */
    int32_t const* candidatePositions,                            /* [N] */
    int64_t const* candidateOffsets,                              /* [L*Hkv + 1] */
    int32_t* counts,                                              /* [L*Hkv] n_h */
    float* temperature,                                           /* [L*Hkv] tau */
    float* calibrated,                                            /* [N] */
    void* workspace, int64_t workspaceBytes);

/* ---- select_ragged: the first ranked candidates of every head ------------------------------------------------------
 *
 * Keeps the counts[h] first of head h, ranked as above by `scores`; their numbers within the head ascend. What counts ask for
 * beyond a head's candidates, or beyond K rows in all, is left out; indices past the last row are -1.
 */
typedef struct
{
    int64_t H;          /* heads of all layers */
    int64_t N;          /* <= 2^31 - 1 */
    int64_t K;          /* rows to keep, the sum of counts, <= N */
    int32_t sinkTokens; /* >= 0 */
} hubkv_select_ragged_params;

HUBKV_API hubkv_status hubkv_select_ragged(hubkv_device device, void* stream, hubkv_select_ragged_params const* params,
    float const* scores,               /* [N] */
    int32_t const* candidatePositions, /* [N] */
    int64_t const* candidateOffsets,   /* [H + 1] */
    int32_t const* counts,             /* [H] */
    int32_t* indices,                  /* [K] */
    int64_t* headOffsets);             /* [H + 1] */

/* ---- rewrite: the kept candidates together, as a new compact segment ------------------------------------------------
 *
 * Candidate indices[r] of head h, for headOffsets[h] <= r < headOffsets[h+1], becomes row r + h * mergedRows of the new segment:
 * each head has room for mergedRows more behind its own, which merge fills. Bytes of keys and values are not changed, row_bias
 * is the row's (0 for tail tokens and where the segment has none). An index outside a head's candidates or a row that is not
 * in the arena gives a row of zeros with position 0 and bias -inf, which attend gives no weight; an offset outside 0..keptRows
 * no row. The new segment must not overlap the old one.
 */
typedef struct
{
    hubkv_candidates_params candidates;
    int64_t keptRows;
    int64_t mergedRows; /* of each head, >= 0 */
} hubkv_rewrite_params;

HUBKV_API hubkv_status hubkv_rewrite(hubkv_device device, void* stream, hubkv_rewrite_params const* params,
    int32_t const* candidatePositions, /* [N] */
    int32_t const* indices,            /* [keptRows] */
    int64_t const* headOffsets,        /* [L*Hkv + 1] */
    int64_t const* arena,              /* [2] */
    int64_t const* segments,           /* [1, 4] */
    int32_t const* blockTable,         /* [1, maxPages] */
    void* kRows,                       /* [keptRows + L*Hkv * mergedRows, D] */
    void* vRows,                       /* the same */
    int32_t* newPositions,             /* [keptRows + L*Hkv * mergedRows] */
    float* rowBias);                   /* the same, or null */

/* ---- merge: the evicted candidates of every head as a few rows --------------------------------------------------------
 *
 * The E candidates of a head that `indices` leaves out, ascending, are cut into mergedRows groups of neighbours: group j has
 * those numbered j * E / mergedRows .. (j + 1) * E / mergedRows - 1 (whole division). With weights
 *   w_i = softmax over the group of logits_i (-inf counts as -1e30: where all are, they weigh alike)
 * group j becomes row headOffsets[h + 1] + h * mergedRows + j of the new segment:
 *   key = sum w_i k_i, value = sum w_i v_i, float32 accumulation; position = that of the group's last candidate
 *   bias = sum w_i (row_bias_i - log w_i)
 * so that its logit is never more than the log-sum-exp of the members' logits, and equal to it for a query whose softmax over
 * them is w (with `raw` of score_window: that of the window, in the mean). Members with bias -inf or outside the arena do not
 * count; a group without members is a row of zeros with position 0 and bias -inf. Call rewrite with the same parameters too;
 * the two write different rows.
 */
HUBKV_API hubkv_status hubkv_merge(hubkv_device device, void* stream, hubkv_rewrite_params const* params,
    float const* logits,               /* [N] */
    int32_t const* candidatePositions, /* [N] */
    int32_t const* indices,            /* [keptRows], ascending within a head */
    int64_t const* headOffsets,        /* [L*Hkv + 1] */
    int64_t const* arena,              /* [2] */
    int64_t const* segments,           /* [1, 4] */
    int32_t const* blockTable,         /* [1, maxPages] */
    void* kRows,                       /* [keptRows + L*Hkv * mergedRows, D] */
    void* vRows,                       /* the same */
    int32_t* newPositions,             /* [keptRows + L*Hkv * mergedRows] */
    float* rowBias);                   /* the same */

#ifdef __cplusplus
}
#endif

#endif /* HUBKV_HUBKV_H */
