#include "output/entries.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"

typedef unsigned long long ull;

void bg_entry_put_run(bg_buf *b, int64_t start_wall_ns)
{
    char host[256] = "", start[40];
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "?");
    bg_format_time(start_wall_ns, start, sizeof start);
    bg_buf_printf(b, "{\"run\":{\"pid\":%ld,\"host\":", (long)getpid());
    bg_buf_json(b, host, strlen(host));
    bg_buf_printf(b, ",\"start\":\"%s\"}}", start);
}

static void put_piece(bg_buf *b, const bg_entry_piece *p)
{
    char hex[17];
    bg_hex64(p->hash, hex);
    bg_buf_printf(b, "\"offset\":%llu,\"bytes\":%llu,\"text\":%llu,\"hash\":\"%s\"", (ull)p->offset,
                  (ull)p->bytes, (ull)p->text, hex);
}

void bg_entry_put_commit(bg_buf *b, const bg_entry_commit *c)
{
    char at[40], hex[17];
    bg_buf_printf(b, "{\"commit\":{\"n\":%llu,", (ull)c->n);
    if (c->folded) bg_buf_str(b, "\"folded\":true,");
    put_piece(b, &c->out);
    if (c->errors) {
        bg_buf_str(b, ",\"errors\":{");
        put_piece(b, c->errors);
        bg_buf_char(b, '}');
    }
    bg_buf_str(b, ",\"records\":\"");
    bg_ranges_print(c->records, b);
    bg_format_time(bg_wall_ns(), at, sizeof at);
    bg_buf_printf(b, "\",\"failed\":%lld,\"tokens\":[%lld,%lld],\"at\":\"%s\"",
                  (long long)c->failed, (long long)c->tokens[0], (long long)c->tokens[1], at);
    size_t before = b->len;
    bg_buf_str(b, ",\"keys\":\"");
    if (bg_keys_print(c->keys, c->records, b))
        bg_buf_char(b, '"');
    else
        b->len = before; /* none of them is known */
    if (c->input) {
        bg_hex64(c->input->hash, hex);
        bg_buf_printf(b,
                      ",\"input\":{\"end\":%llu,\"hash\":\"%s\",\"read\":%llu,\"total\":%llu,"
                      "\"records\":%lld}",
                      (ull)c->input->end, hex, (ull)c->input->read, (ull)c->input->total,
                      (long long)c->input->records);
    }
}

void bg_entry_put_end(bg_buf *b, const bg_entry_end *e)
{
    bg_buf_printf(b, "{\"end\":{\"commits\":%llu,\"bytes\":%llu,\"text\":%llu", (ull)e->commits,
                  (ull)e->out.bytes, (ull)e->out.text);
    if (e->errors)
        bg_buf_printf(b, ",\"errors\":{\"bytes\":%llu,\"text\":%llu}", (ull)e->errors->bytes,
                      (ull)e->errors->text);
    bg_buf_printf(b, ",\"records\":%lld,\"failed\":%lld", (long long)e->records,
                  (long long)e->failed);
    if (e->selection && *e->selection) {
        bg_buf_str(b, ",\"selection\":");
        bg_buf_json(b, e->selection, strlen(e->selection));
    }
    if (e->ordered) bg_buf_str(b, ",\"ordered\":true");
    bg_buf_str(b, "}}");
}
