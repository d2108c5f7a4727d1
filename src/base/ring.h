/* base/ring.h - a ring of messages of any size between one writer and one reader, in memory that
 * two processes may share.
 *
 * The memory holds no pointers, so each side may map it anywhere. A message is there whole or not
 * at all: a writer that is killed inside bg_ring_write() leaves the ring as it was.
 *
 * To the byte: struct bg_ring (ring.c), then `capacity` bytes. head and tail count bytes written
 * and read since the start and never wrap; a message takes 8 bytes that hold its length, then its
 * bytes, padded to 8; it may run over the end of the buffer to its beginning.
 *
 * Memory order: the writer copies the message, then stores head; the reader loads head, then
 * copies: store and load are a release-acquire pair. The same holds for tail in the other
 * direction, so that the writer never overwrites bytes still being copied out. Before a side sleeps
 * it announces so and looks once more; the other side first stores its counter, then looks for
 * sleepers. These four are sequentially consistent: at least one side sees the other, and no
 * wake-up is lost.
 *
 * Waiting spins for a few microseconds, then sleeps on a futex. */
#ifndef BG_BASE_RING_H
#define BG_BASE_RING_H

#include <stddef.h>
#include <stdint.h>

typedef struct bg_ring bg_ring;

typedef enum bg_ring_result {
    BG_RING_OK = 0,
    BG_RING_TIMEOUT, /* nothing to read, or no room, within the time */
    BG_RING_KICKED,  /* reader only: bg_ring_kick() was called, and there is no message */
    BG_RING_CLOSED,  /* writer: closed. Reader: closed and empty */
    BG_RING_TOO_BIG, /* writer: can never fit. Reader: buf is too small; the message stays, *n says
                        its size */
    BG_RING_BROKEN,  /* reader: the counters or a length make no sense */
} bg_ring_result;

/* Bytes of 64-byte aligned memory for a ring of `capacity`, which is rounded up to a power of two.
 * A message of n bytes fits if n <= capacity - 16. */
size_t bg_ring_bytes(size_t capacity);
/* Makes an empty, open ring in memory; nobody may be using it. Returns memory. */
bg_ring *bg_ring_init(void *memory, size_t capacity);

/* timeout_ns: 0 tries once, negative waits for ever. */
bg_ring_result bg_ring_write(bg_ring *r, const void *data, size_t n, int64_t timeout_ns);
bg_ring_result bg_ring_read(bg_ring *r, void *buf, size_t cap, size_t *n, int64_t timeout_ns);
/* Makes the next bg_ring_read() that finds no message return BG_RING_KICKED, and wakes the reader.
 * Kicks do not add up. From any thread or process, also the reader's. */
void bg_ring_kick(bg_ring *r);
/* No more writes; what is inside can still be read. Wakes both sides. From anywhere; may be
 * repeated. */
void bg_ring_close(bg_ring *r);

#endif
