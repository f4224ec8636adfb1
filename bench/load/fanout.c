/* SSE fan-out: many readers of one stream, one writer at a fixed rate. Each message carries its number and the
 * moment it was due, so lateness of the writer itself counts too (no coordinated omission). */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define WRITERS 8
#define LINE_BYTES 65536

struct reader {
    bool is_writer, busy;
    int fd;
    struct reply reply;
    char *line;
    size_t line_length;
    uint8_t *seen; /* one bit per message */
    char offset[OFFSET_BYTES_MAX];
    uint64_t sent_ns;
    char request[1024];
};
struct counts {
    uint64_t sent, appended, failed, delivered, duplicates, reconnects;
};
static struct {
    struct hist delivery, append; /* since the last report */
    struct counts now, reported;
    uint64_t opened, total, begin_ns;
    double begin_cpu;
    const struct options *o;
} run;
static int poller;
static char receive_buffer[RECV_BUFFER_BYTES];

static void message_seen(struct reader *r, uint64_t number, uint64_t due_ns) {
    if (number >= run.total) return;
    if (r->seen[number / 8] & (1 << (number % 8))) {
        run.now.duplicates++;
        return;
    }
    r->seen[number / 8] |= (uint8_t)(1 << (number % 8));
    run.now.delivered++;
    hist_add(&run.delivery, now_ns() - due_ns);
}

static void read_line(struct reader *r) {
    /* Hand-made and not sscanf: this runs for every delivery, and the load must not be what is measured. */
    const char *at = r->line;
    r->line[r->line_length] = 0;
    if (memcmp(at, "data:", 5) != 0) return;
    const char *next = strstr(at, "\"streamNextOffset\":\"");
    if (next) {
        size_t length = strcspn(next + 20, "\"");
        if (length < OFFSET_BYTES_MAX) memcpy(r->offset, next + 20, length), r->offset[length] = 0;
        return;
    }
    while ((at = strstr(at, "{\"n\":")) != NULL) {
        char *end;
        uint64_t number = strtoull(at + 5, &end, 10);
        if (strncmp(end, ",\"t\":", 5) == 0) message_seen(r, number, strtoull(end + 5, NULL, 10));
        at += 5;
    }
}

static void body_seen(void *owner, const char *bytes, size_t n) {
    struct reader *r = owner;
    while (n > 0) {
        const char *end = memchr(bytes, '\n', n);
        size_t take = end ? (size_t)(end - bytes) : n;
        if (r->line_length + take >= LINE_BYTES) die("event line over %d bytes", LINE_BYTES);
        memcpy(r->line + r->line_length, bytes, take);
        r->line_length += take;
        if (!end) return;
        read_line(r);
        r->line_length = 0;
        bytes += take + 1;
        n -= take + 1;
    }
}

static void open_reader(struct reader *r) {
    char request[1024], path[512], full[768];
    fill_path(path, sizeof path, run.o->path, 0);
    snprintf(full, sizeof full, "%s?offset=%s&live=sse", path, r->offset[0] ? r->offset : "-1");
    int n = http_request(request, sizeof request, run.o, "GET", full, NULL, 0);
    r->fd = connect_to(run.o);
    reply_reset(&r->reply);
    r->reply.sink = r->is_writer ? NULL : body_seen;
    r->reply.owner = r;
    r->line_length = 0;
    if (!r->is_writer) send_all(r->fd, request, (size_t)n);
    set_nonblocking(r->fd, true);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = r};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, r->fd, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

static void reopen(struct reader *r) {
    if (r->is_writer && r->busy) run.now.failed++;
    close(r->fd);
    r->busy = false;
    run.now.reconnects++;
    open_reader(r);
}

static void writer_answered(struct reader *w) {
    if (w->reply.status >= 200 && w->reply.status < 300) run.now.appended++, hist_add(&run.append, now_ns() - w->sent_ns);
    else run.now.failed++;
    w->busy = false;
    reply_reset(&w->reply);
}

static void readable(struct reader *r) {
    bool was_head = r->reply.state == REPLY_HEAD, done = false;
    ssize_t got = recv(r->fd, receive_buffer, sizeof receive_buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        reopen(r);
        return;
    }
    reply_feed(&r->reply, receive_buffer, (size_t)got, &done);
    if (r->is_writer && done) writer_answered(r);
    if (r->is_writer) return;
    if (was_head && r->reply.state != REPLY_HEAD) {
        run.opened++;
        if (r->reply.status != 200) die("a reader was answered %d", r->reply.status);
    }
    if (done) reopen(r);
}

static void poll_once(int timeout_ms) {
    struct epoll_event events[512];
    int n = epoll_wait(poller, events, 512, timeout_ms);
    for (int i = 0; i < n; i++)
        if (events[i].data.ptr) readable(events[i].data.ptr);
}

/* Sends message number run.now.sent on an idle connection; false when all are busy. */
static bool send_message(struct reader *writers, uint64_t due_ns) {
    struct reader *w = writers;
    while (w < writers + WRITERS && w->busy) w++;
    if (w == writers + WRITERS) return false;
    char body[512], path[512];
    int head = snprintf(body, sizeof body, "{\"n\":%llu,\"t\":%llu,\"p\":\"", (unsigned long long)run.now.sent, (unsigned long long)due_ns);
    while (head < run.o->body_bytes - 2 && head < 500) body[head++] = 'x';
    head += sprintf(body + head, "\"}");
    fill_path(path, sizeof path, run.o->path, 0);
    int n = http_request(w->request, sizeof w->request, run.o, "POST", path, body, (size_t)head);
    w->busy = true;
    w->sent_ns = now_ns();
    send_all(w->fd, w->request, (size_t)n);
    run.now.sent++;
    return true;
}

/* What has come since the last report. What is on its way then counts in the next one: only sums tell what was missed. */
static void report(uint64_t now) {
    struct counts c = {run.now.sent - run.reported.sent, run.now.appended - run.reported.appended, run.now.failed - run.reported.failed,
                       run.now.delivered - run.reported.delivered, run.now.duplicates - run.reported.duplicates,
                       run.now.reconnects - run.reported.reconnects};
    double seconds = (double)(now - run.begin_ns) / 1e9, cpu = cpu_seconds() - run.begin_cpu;
    uint64_t expected = c.appended * (uint64_t)run.o->readers;
    printf("{\"mode\":\"fanout\",\"readers\":%d,\"rate_per_s\":%d,\"seconds\":%.3f,\"offered\":%llu,\"sent\":%llu,\"appended\":%llu,\"append_errors\":%llu,"
           "\"expected\":%llu,\"delivered\":%llu,\"duplicates\":%llu,\"reconnects\":%llu,\"load_cpu_share\":%.3f,",
           run.o->readers, run.o->rate_per_s, seconds, (unsigned long long)run.total, (unsigned long long)c.sent, (unsigned long long)c.appended,
           (unsigned long long)c.failed, (unsigned long long)expected, (unsigned long long)c.delivered,
           (unsigned long long)c.duplicates, (unsigned long long)c.reconnects, cpu / seconds);
    hist_print(&run.delivery, "delivery_us");
    printf(",");
    hist_print(&run.append, "append_us");
    printf("}\n");
    fflush(stdout);
    memset(&run.delivery, 0, sizeof run.delivery);
    memset(&run.append, 0, sizeof run.append);
    run.reported = run.now;
    run.begin_ns = now;
    run.begin_cpu = cpu_seconds();
}

static void write_at_rate(struct reader *writers) {
    uint64_t step_ns = 1000000000ull / (uint64_t)run.o->rate_per_s, start = now_ns() + step_ns;
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
    uint64_t patience = start + (uint64_t)(2e9 * run.o->seconds); /* a server that cannot keep up ends the run late, not never */
    while (run.now.sent < run.total && now_ns() < patience) {
        uint64_t due = start + run.now.sent * step_ns;
        if (now_ns() >= due && send_message(writers, due)) continue;
        uint64_t wake = now_ns() >= due ? now_ns() + 200000 : due;
        struct itimerspec at = {.it_value = {.tv_sec = (time_t)(wake / 1000000000u), .tv_nsec = (long)(wake % 1000000000u)}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        poll_once(1000);
        if (run.o->every_seconds > 0 && now_ns() >= run.begin_ns + (uint64_t)(run.o->every_seconds * 1e9)) report(now_ns());
    }
    close(timer);
}

void run_fanout(const struct options *o) {
    run.o = o;
    run.total = (uint64_t)(o->seconds * o->rate_per_s);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (o->create) http_create_streams(o);
    struct reader *all = calloc((size_t)o->readers + WRITERS, sizeof *all);
    for (int i = 0; i < o->readers + WRITERS; i++) {
        all[i].is_writer = i >= o->readers;
        all[i].line = malloc(LINE_BYTES);
        all[i].seen = calloc(run.total / 8 + 1, 1);
        open_reader(&all[i]);
        poll_once(0);
    }
    for (uint64_t until = now_ns() + 15000000000ull; run.opened < (uint64_t)o->readers;) {
        if (now_ns() > until) die("only %llu of %d readers were answered", (unsigned long long)run.opened, o->readers);
        poll_once(100);
    }
    run.begin_ns = now_ns();
    run.begin_cpu = cpu_seconds();
    write_at_rate(all + o->readers);
    uint64_t written = now_ns(), until = written + (uint64_t)(o->drain_seconds * 1e9);
    uint64_t expected = run.now.sent * (uint64_t)o->readers;
    while (now_ns() < until && (run.now.delivered < expected || run.now.appended + run.now.failed < run.now.sent)) poll_once(20);
    report(written);
}
