/* engine/step.h - the messages between coordinator and ranks.
 *
 * Both sides are the same program on the same machine: numbers are in its byte order, every field
 * is 4 bytes wide unless said, 64-bit ones lie at offsets divisible by 8, and a message starts
 * 8-byte aligned. A reader checks every count against the message's length.
 *
 * Down, to every rank the same:
 *
 *   SEAT    0 kind=1   4 slot       8 seed (8 bytes)      16 temperature  20 top_k   24 top_p   28
 * min_p 32 repetition_penalty   36 presence_penalty    40 frequency_penalty      44 n_logprobs 48
 * min_tokens           52 n_generated         56 n_tokens    60 n_blocks 64 n_bias               68
 * n_stop_ids 72 tokens[n_tokens] blocks[n_blocks] bias[n_bias] (token, bias) stop_ids[n_stop_ids]
 *   STEP    0 kind=2   4 n_seqs     8 number (8 bytes)    16 entries, each:
 *           0 slot     4 pos0       8 n_tokens  12 n_blocks  16 sample (0 or 1)  20
 * blocks[n_blocks] STOP    0 kind=3   4 zero
 *
 * A seat replaces the slot's sequence and block table; blocks of an entry are appended to the
 * table. Ranks work messages off in order, so that a seat may overtake nothing.
 *
 * Up, from rank 0:
 *
 *   RESULT  0 kind=4   4 n          8 number (8 bytes)    16 time the step took in ns (8 bytes)
 *          24 entries, each: 0 slot  4 token  8 logprob  12 n_top  16 top[n_top] (token, logprob)
 */
#ifndef BG_ENGINE_STEP_H
#define BG_ENGINE_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/ops.h"
#include "base/error.h"

typedef enum bg_msg_kind { BG_MSG_SEAT = 1, BG_MSG_STEP, BG_MSG_STOP, BG_MSG_RESULT } bg_msg_kind;

typedef struct bg_msg_seat { /* after reading: pointers into the message */
    int32_t slot, n_generated, n_tokens, n_blocks;
    const int32_t *tokens, *blocks;
    bg_sampling sampling;
} bg_msg_seat;

typedef struct bg_msg_entry {
    int32_t slot, pos0, n_tokens, n_blocks;
    const int32_t *blocks; /* new ones */
    bool sample;
} bg_msg_entry;

typedef struct bg_msg_step { /* a step being read */
    int32_t n_seqs;
    uint64_t number;
    const unsigned char *at;
    size_t left;
} bg_msg_step;

typedef struct bg_msg_result {
    int32_t n;
    uint64_t number;
    int64_t step_ns;
} bg_msg_result;

/* Bytes of a message. */
size_t bg_msg_seat_bytes(const bg_msg_seat *seat);
size_t bg_msg_step_bytes(int32_t n_seqs, int64_t n_blocks);
size_t bg_msg_result_max_bytes(int32_t n); /* with every top full */

/* The writers return the bytes written; 0: buf is too small. buf is 8-byte aligned. */
size_t bg_msg_put_seat(void *buf, size_t cap, const bg_msg_seat *seat);
size_t bg_msg_put_step(void *buf, size_t cap, uint64_t number, const bg_msg_entry *e, int32_t n);
size_t bg_msg_put_stop(void *buf, size_t cap);
size_t bg_msg_put_result(void *buf, size_t cap, const bg_msg_result *head, const bg_sampled *s);

/* The readers fail with BG_INTERNAL on anything that does not add up. */
bg_status bg_msg_get_kind(const void *msg, size_t n, bg_msg_kind *kind, bg_error *err);
bg_status bg_msg_get_seat(const void *msg, size_t n, bg_msg_seat *seat, bg_error *err);
bg_status bg_msg_get_step(const void *msg, size_t n, bg_msg_step *step, bg_error *err);
bg_status bg_msg_next_entry(bg_msg_step *step, bg_msg_entry *e, bg_error *err); /* n_seqs times */
/* out has room for `room` tokens. */
bg_status bg_msg_get_result(const void *msg, size_t n, bg_msg_result *head, bg_sampled *out,
                            int32_t room, bg_error *err);

#endif
