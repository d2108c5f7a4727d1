/* A result as one JSON line. Written straight into the buffer: this runs for every record. */
#include "output/output.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "output/number.h"

static void put_text(bg_buf *b, const char *s)
{
    if (s)
        bg_buf_json(b, s, strlen(s));
    else
        bg_buf_str(b, "null");
}

static void put_int(bg_buf *b, int64_t v)
{
    char digits[24], *p = digits + sizeof digits;
    uint64_t u = v < 0 ? -(uint64_t)v : (uint64_t)v;
    do {
        *--p = (char)('0' + u % 10);
    } while (u /= 10);
    if (v < 0) *--p = '-';
    bg_buf_add(b, p, (size_t)(digits + sizeof digits - p));
}

static void put_logprob(bg_buf *b, float f)
{
    bg_number_put(b, isfinite(f) && f > -9999 ? f : -9999); /* JSON has no infinity */
}

static void put_token(bg_buf *b, const bg_top_text *t)
{
    bg_buf_str(b, "\"token\":");
    bg_buf_json(b, t->text, t->n);
    bg_buf_str(b, ",\"logprob\":");
    put_logprob(b, t->logprob);
    bg_buf_str(b, ",\"bytes\":[");
    for (size_t i = 0; i < t->n; i++) {
        if (i) bg_buf_char(b, ',');
        put_int(b, (unsigned char)t->text[i]);
    }
    bg_buf_char(b, ']');
}

/* [{token, logprob, bytes, top_logprobs}, ...] */
static void put_token_list(bg_buf *b, const bg_choice *c)
{
    bg_buf_char(b, '[');
    for (int i = 0; i < c->n_tokens; i++) {
        const bg_token_info *t = &c->tokens[i];
        bg_buf_str(b, i ? ",{" : "{");
        put_token(b, &t->chosen);
        bg_buf_str(b, ",\"top_logprobs\":[");
        for (int k = 0; k < t->n_top; k++) {
            bg_buf_str(b, k ? ",{" : "{");
            put_token(b, &t->top[k]);
            bg_buf_char(b, '}');
        }
        bg_buf_str(b, "]}");
    }
    bg_buf_char(b, ']');
}

/* Completions have no bytes field; a token that is no text by itself is shown as OpenAI does. */
static void put_token_key(bg_buf *b, const bg_top_text *t)
{
    if (bg_utf8_valid(t->text, t->n)) {
        bg_buf_json(b, t->text, t->n);
        return;
    }
    bg_buf_str(b, "\"bytes:");
    for (size_t i = 0; i < t->n; i++)
        bg_buf_printf(b, "\\\\x%02x", (unsigned)(unsigned char)t->text[i]);
    bg_buf_char(b, '"');
}

static bool same_text(const bg_top_text *a, const bg_top_text *b)
{
    return a->n == b->n && (a->n == 0 || memcmp(a->text, b->text, a->n) == 0);
}

static void put_top_map(bg_buf *b, const bg_token_info *t)
{
    bool first = true;
    bg_buf_char(b, '{');
    for (int k = 0; k < t->n_top; k++) {
        bool again =
            false; /* two tokens of the same text would be one key twice: the better one stays */
        for (int j = 0; j < k && !again; j++)
            again = same_text(&t->top[j], &t->top[k]);
        if (again) continue;
        if (!first) bg_buf_char(b, ',');
        first = false;
        put_token_key(b, &t->top[k]);
        bg_buf_char(b, ':');
        put_logprob(b, t->top[k].logprob);
    }
    bg_buf_char(b, '}');
}

/* {tokens, token_logprobs, top_logprobs, text_offset}; offsets count characters of the answer. */
static void put_completion_logprobs(bg_buf *b, const bg_choice *c)
{
    bg_buf_str(b, "{\"tokens\":[");
    for (int i = 0; i < c->n_tokens; i++) {
        if (i) bg_buf_char(b, ',');
        put_token_key(b, &c->tokens[i].chosen);
    }
    bg_buf_str(b, "],\"token_logprobs\":[");
    for (int i = 0; i < c->n_tokens; i++) {
        if (i) bg_buf_char(b, ',');
        put_logprob(b, c->tokens[i].chosen.logprob);
    }
    bg_buf_str(b, "],\"top_logprobs\":[");
    for (int i = 0; i < c->n_tokens; i++) {
        if (i) bg_buf_char(b, ',');
        put_top_map(b, &c->tokens[i]);
    }
    bg_buf_str(b, "],\"text_offset\":[");
    int64_t offset = 0;
    for (int i = 0; i < c->n_tokens; i++) {
        if (i) bg_buf_char(b, ',');
        put_int(b, offset);
        const bg_top_text *t = &c->tokens[i].chosen;
        for (size_t k = 0; k < t->n; k++)
            offset += ((unsigned char)t->text[k] & 0xc0) != 0x80;
    }
    bg_buf_str(b, "]}");
}

static bool has_stop_reason(const bg_choice *c)
{
    return c->stop_text || c->stop_id >= 0;
}

static void put_stop_reason(bg_buf *b, const bg_choice *c)
{
    if (!c->stop_text && c->stop_id >= 0)
        put_int(b, c->stop_id);
    else
        put_text(b, c->stop_text);
}

static void put_usage(bg_buf *b, const bg_result *r, bool total)
{
    bg_buf_str(b, "\"usage\":{\"prompt_tokens\":");
    put_int(b, r->prompt_tokens);
    bg_buf_str(b, ",\"completion_tokens\":");
    put_int(b, r->completion_tokens);
    if (total) {
        bg_buf_str(b, ",\"total_tokens\":");
        put_int(b, r->prompt_tokens + r->completion_tokens);
    }
    bg_buf_char(b, '}');
}

static void put_place(bg_buf *b, const bg_result *r)
{
    bg_buf_str(b, "\"line\":");
    put_int(b, r->line);
    if (r->file_name) {
        bg_buf_str(b, ",\"file\":");
        put_text(b, r->file_name);
    }
}

/* ---- OpenAI batch lines
 * ------------------------------------------------------------------------------ */

static void openai_choice(bg_buf *b, const bg_result *r, const bg_choice *c)
{
    bg_buf_str(b, "{\"index\":");
    put_int(b, c->index);
    bg_buf_str(b, r->chat ? ",\"message\":{\"role\":\"assistant\",\"content\":" : ",\"text\":");
    bg_buf_json(b, c->text, c->n_text);
    bg_buf_str(b, r->chat ? ",\"refusal\":null},\"logprobs\":" : ",\"logprobs\":");
    if (!c->tokens) {
        bg_buf_str(b, "null");
    } else if (r->chat) {
        bg_buf_str(b, "{\"content\":");
        put_token_list(b, c);
        bg_buf_str(b, ",\"refusal\":null}");
    } else {
        put_completion_logprobs(b, c);
    }
    bg_buf_str(b, ",\"finish_reason\":");
    put_text(b, c->finish_reason);
    bg_buf_str(b, ",\"stop_reason\":");
    put_stop_reason(b, c);
    bg_buf_char(b, '}');
}

static void openai_body(bg_buf *b, const bg_result *r)
{
    bg_buf_printf(b, "{\"id\":\"%s-%lld\",\"object\":\"%s\",\"created\":0,\"model\":",
                  r->chat ? "chatcmpl" : "cmpl", (long long)r->record,
                  r->chat ? "chat.completion" : "text_completion");
    put_text(b, r->model ? r->model : "");
    bg_buf_str(b, ",\"choices\":[");
    for (int i = 0; i < r->n_choices; i++) {
        if (i) bg_buf_char(b, ',');
        openai_choice(b, r, &r->choices[i]);
    }
    bg_buf_str(b, "],");
    put_usage(b, r, true);
    bg_buf_str(b, ",\"system_fingerprint\":");
    put_text(b, r->fingerprint);
    bg_buf_char(b, '}');
}

static void openai_error_body(bg_buf *b, const bg_result *r, bool ours)
{
    bg_buf_str(b, "{\"error\":{\"message\":");
    put_text(b, r->error_message ? r->error_message : r->error_code);
    bg_buf_str(b, ours ? ",\"type\":\"server_error\"" : ",\"type\":\"invalid_request_error\"");
    bg_buf_str(b, ",\"param\":");
    put_text(b, r->error_param);
    bg_buf_str(b, ",\"code\":");
    put_text(b, r->error_code);
    bg_buf_str(b, "}}");
}

static void openai_line(const bg_result *r, bg_buf *b)
{
    bool failed = r->error_code != NULL, ours = failed && !strcmp(r->error_code, "internal_error");
    bg_buf_printf(b,
                  "{\"id\":\"batch_req_%lld\",\"custom_id\":%s,\"response\":{\"status_code\":%d,"
                  "\"request_id\":\"req_%lld\",\"body\":",
                  (long long)r->record, r->id ? r->id : "null",
                  !failed ? 200
                  : ours  ? 500
                          : 400,
                  (long long)r->record);
    if (failed)
        openai_error_body(b, r, ours);
    else
        openai_body(b, r);
    bg_buf_str(b, "},\"error\":");
    if (failed) {
        bg_buf_str(b, "{\"code\":");
        put_text(b, r->error_code);
        bg_buf_str(b, ",\"message\":");
        put_text(b, r->error_message ? r->error_message : r->error_code);
        bg_buf_str(b, ",\"line\":");
        put_int(b, r->line);
        bg_buf_char(b, '}');
    } else {
        bg_buf_str(b, "null");
    }
    bg_buf_char(b, ',');
    put_place(b, r);
    bg_buf_str(b, "}\n");
}

/* ---- plain lines
 * ----------------------------------------------------------------------------------- */

static void plain_choice(bg_buf *b, const bg_choice *c)
{
    bg_buf_str(b, "\"text\":");
    bg_buf_json(b, c->text, c->n_text);
    bg_buf_str(b, ",\"finish_reason\":");
    put_text(b, c->finish_reason);
    if (has_stop_reason(c)) {
        bg_buf_str(b, ",\"stop_reason\":");
        put_stop_reason(b, c);
    }
    if (c->tokens) {
        bg_buf_str(b, ",\"logprobs\":");
        put_token_list(b, c);
    }
}

static void plain_line(const bg_result *r, bg_buf *b)
{
    bg_buf_char(b, '{');
    put_place(b, r);
    if (r->file_name) { /* a line number is a record number in one input only */
        bg_buf_str(b, ",\"record\":");
        put_int(b, r->record);
    }
    bg_buf_str(b, ",\"id\":");
    bg_buf_str(b, r->id ? r->id : "null");
    bg_buf_char(b, ',');
    if (r->error_code) {
        bg_buf_str(b, "\"error\":{\"code\":");
        put_text(b, r->error_code);
        bg_buf_str(b, ",\"message\":");
        put_text(b, r->error_message ? r->error_message : r->error_code);
        bg_buf_str(b, ",\"param\":");
        put_text(b, r->error_param);
        bg_buf_str(b, "}}\n");
        return;
    }
    if (r->n_choices == 1) {
        plain_choice(b, &r->choices[0]);
    } else {
        bg_buf_str(b, "\"choices\":[");
        for (int i = 0; i < r->n_choices; i++) {
            bg_buf_str(b, i ? ",{\"index\":" : "{\"index\":");
            put_int(b, r->choices[i].index);
            bg_buf_char(b, ',');
            plain_choice(b, &r->choices[i]);
            bg_buf_char(b, '}');
        }
        bg_buf_char(b, ']');
    }
    bg_buf_char(b, ',');
    put_usage(b, r, false);
    bg_buf_str(b, "}\n");
}

void bg_result_line(const bg_result *r, bg_buf *out)
{
    if (r->openai)
        openai_line(r, out);
    else
        plain_line(r, out);
}
