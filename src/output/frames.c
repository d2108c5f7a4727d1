#include "output/frames.h"

#include <stdint.h>
#include <string.h>

#include <lz4frame.h>

bg_status bg_frame_put(bg_buf *out, const char *text, size_t n, int level, bg_error *err)
{
    LZ4F_preferences_t p = {.frameInfo = {.blockSizeID = LZ4F_max1MB,
                                          .blockMode = LZ4F_blockLinked,
                                          .contentChecksumFlag = LZ4F_contentChecksumEnabled,
                                          .blockChecksumFlag = LZ4F_blockChecksumEnabled,
                                          .contentSize = n},
                            .compressionLevel = level};
    size_t bound = LZ4F_compressFrameBound(n, &p);
    if (!bg_buf_reserve(out, bound)) return bg_fail(err, BG_NOMEM, "LZ4 frame: out of memory");
    size_t w = LZ4F_compressFrame(out->data + out->len, bound, text, n, &p);
    if (LZ4F_isError(w)) return bg_fail(err, BG_NOMEM, "LZ4 frame: %s", LZ4F_getErrorName(w));
    out->len += w;
    return BG_OK;
}

static bg_status bad(bg_error *err, const char *why)
{
    return bg_fail(err, BG_FORMAT, "LZ4 frame: %s", why);
}

/* The library's complaint; one about memory says nothing about the frame. */
static bg_status bad_code(bg_error *err, size_t code)
{
    const char *name = LZ4F_getErrorName(code);
    if (strcmp(name, "ERROR_allocation_failed") == 0)
        return bg_fail(err, BG_NOMEM, "LZ4 frame: out of memory");
    return bad(err, name);
}

bg_status bg_frame_get(bg_buf *out, const char *data, size_t n, size_t limit, size_t *used,
                       bg_error *err)
{
    static const unsigned char magic[4] = {0x04, 0x22, 0x4d, 0x18};
    *used = 0;
    if (n < 15 || memcmp(data, magic, 4) != 0) return bad(err, "does not start here");
    LZ4F_dctx *ctx = NULL;
    if (LZ4F_isError(LZ4F_createDecompressionContext(&ctx, LZ4F_VERSION)))
        return bg_fail(err, BG_NOMEM, "LZ4 frame: out of memory");
    bg_status st = BG_OK;
    LZ4F_frameInfo_t info;
    size_t at = n, start = out->len, rc = LZ4F_getFrameInfo(ctx, &info, data, &at);
    if (LZ4F_isError(rc)) {
        st = bad_code(err, rc);
        goto out;
    }
    if (!info.contentSize || !info.contentChecksumFlag || !info.blockChecksumFlag || info.dictID) {
        st = bad(err, "was not written by batchgen: no size or no checksums");
        goto out;
    }
    if (info.contentSize > limit) {
        st = bad(err, "claims to hold more text than is allowed");
        goto out;
    }
    while (rc != 0 && at < n) {
        /* grows with the data, not with what the header claims */
        if (!bg_buf_reserve(out, 1 << 18)) {
            st = bg_fail(err, BG_NOMEM, "LZ4 frame: out of memory");
            goto out;
        }
        size_t n_out = out->cap - out->len - 1, n_in = n - at;
        rc = LZ4F_decompress(ctx, out->data + out->len, &n_out, data + at, &n_in, NULL);
        if (LZ4F_isError(rc)) {
            st = bad_code(err, rc);
            goto out;
        }
        out->len += n_out;
        at += n_in;
        if (out->len - start > limit || (n_in == 0 && n_out == 0)) {
            st = bad(err, "holds more text than it says");
            goto out;
        }
    }
    if (rc != 0)
        st = bad(err, "is cut short");
    else if (out->len - start != info.contentSize)
        st = bad(err, "holds another amount of text than it says");
    else
        *used = at;
out:
    LZ4F_freeDecompressionContext(ctx);
    return st;
}
