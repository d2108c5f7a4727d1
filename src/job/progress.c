#include "job/progress.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

enum { BAR = 20, REDRAW_NS = 200000000 };

struct bg_progress {
    FILE *out;
    bool tty, color, shown;
    int64_t interval_ns, start_ns, last_ns;
    /* Rates over the time since the sample before. */
    int64_t rate_ns, rate_output, rate_prompt;
    double output_rate, prompt_rate;
};

bg_progress *bg_progress_new(FILE *out, bool tty, bool color, double interval_s)
{
    bg_progress *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    *p = (bg_progress){.out = out,
                       .tty = tty,
                       .color = color,
                       .interval_ns = (int64_t)(interval_s * 1e9),
                       .start_ns = bg_now_ns()};
    p->last_ns = p->start_ns;
    p->rate_ns = p->start_ns;
    return p;
}

void bg_progress_hide(void *v)
{
    bg_progress *p = v;
    if (p && p->shown) {
        fputs("\r\033[K", p->out);
        fflush(p->out);
        p->shown = false;
    }
}

void bg_progress_unhide(void *v)
{
    (void)v; /* the next redraw brings it back */
}

void bg_progress_free(bg_progress *p)
{
    bg_progress_hide(p);
    free(p);
}

static void update_rates(bg_progress *p, const bg_progress_numbers *n, int64_t now)
{
    double dt = (double)(now - p->rate_ns) * 1e-9;
    if (dt < 1) return;
    double o = (double)(n->output_tokens - p->rate_output) / dt;
    double i = (double)(n->prompt_tokens - p->rate_prompt) / dt;
    bool first = p->rate_ns == p->start_ns;
    p->output_rate = first ? o : 0.7 * p->output_rate + 0.3 * o;
    p->prompt_rate = first ? i : 0.7 * p->prompt_rate + 0.3 * i;
    p->rate_ns = now;
    p->rate_output = n->output_tokens;
    p->rate_prompt = n->prompt_tokens;
}

/* How many records there will be: from the share of the input that has been read. 0: unknown. */
static double expected_records(const bg_progress_numbers *n)
{
    if (!n->total || !n->read || !n->records_read) return 0;
    if (n->read >= n->total) return (double)(n->done + n->in_flight);
    double all = (double)n->records_read * ((double)n->total / (double)n->read);
    if (n->limit && all > (double)n->limit) all = (double)n->limit;
    return n->wanted > 0 ? all * n->wanted : all;
}

void bg_progress_show(bg_progress *p, const bg_progress_numbers *n, bool force)
{
    if (!p) return;
    int64_t now = bg_now_ns();
    int64_t every = p->tty ? REDRAW_NS : p->interval_ns;
    if (!force && (!every || now - p->last_ns < every)) return;
    p->last_ns = now;
    update_rates(p, n, now);
    double all = expected_records(n), share = all > 0 ? (double)n->done / all : 0;
    if (share > 1) share = 1;
    char eta[40] = "", line[512];
    if (n->done_now > 0 && all > (double)n->done) {
        double left = (all - (double)n->done) / (double)n->done_now * (double)(now - p->start_ns);
        char d[32];
        bg_format_duration((int64_t)left, d, sizeof d);
        snprintf(eta, sizeof eta, "  ETA %s", d);
    }
    char failed[40] = "";
    if (n->failed) snprintf(failed, sizeof failed, "  %lld failed", (long long)n->failed);
    int len =
        snprintf(line, sizeof line,
                 "%3.0f%%  %lld%s%.0f records%s  %.0f tok/s out  %.0f in  %d running  %d waiting%s",
                 share * 100, (long long)n->done, all > 0 ? " of ~" : " of ", all, failed,
                 p->output_rate, p->prompt_rate, n->running, n->waiting, eta);
    if (!p->tty) {
        char ts[32];
        bg_format_time(bg_wall_ns(), ts, sizeof ts);
        fprintf(p->out, "%s %s\n", ts, line);
        fflush(p->out);
        return;
    }
    struct winsize w;
    int width = ioctl(fileno(p->out), TIOCGWINSZ, &w) == 0 && w.ws_col ? w.ws_col : 80;
    bg_buf bar = {0};
    for (int i = 0; i < BAR; i++)
        bg_buf_str(&bar, i < (int)(share * BAR + 0.5) ? "█" : "░");
    if (len > width - BAR - 3) line[width > BAR + 3 ? width - BAR - 3 : 0] = 0;
    fprintf(p->out, "\r\033[K%s%s%s %s", p->color ? "\033[36m" : "", bar.data ? bar.data : "",
            p->color ? "\033[0m" : "", line);
    fflush(p->out);
    bg_buf_release(&bar);
    p->shown = true;
}

void bg_progress_note(bg_progress *p, const char *what, double share)
{
    if (!p || !p->tty) return;
    int64_t now = bg_now_ns();
    if (p->shown && now - p->last_ns < REDRAW_NS) return;
    p->last_ns = now;
    fprintf(p->out, "\r\033[K%s %3.0f%%", what, share * 100);
    fflush(p->out);
    p->shown = true;
}
