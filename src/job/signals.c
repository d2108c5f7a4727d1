#include "job/signals.h"

#include <errno.h>
#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

bg_status bg_signals_block(bg_signals *s, bg_error *err)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGQUIT};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaddset(&set, numbers[i]);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is then an error of write() */
    pthread_sigmask(SIG_BLOCK, &set, &s->before);
    s->fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->fd < 0 ? bg_fail_os(err, "cannot make a signal descriptor") : BG_OK;
}

void bg_signals_restore(bg_signals *s)
{
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    pthread_sigmask(SIG_SETMASK, &s->before, NULL);
}

int bg_signals_take(bg_signals *s)
{
    struct signalfd_siginfo info;
    ssize_t n = read(s->fd, &info, sizeof info);
    return n == (ssize_t)sizeof info ? (int)info.ssi_signo : 0;
}
